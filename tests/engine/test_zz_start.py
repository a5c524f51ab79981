import pytest
from tests.support.real.system import *
from tests.support.real.warm import client as warm
from costplug import tree_cpu
import time


def test_start(tmp_path):
    c = tree_cpu()
    t = time.monotonic()
    warm.server()

    # wait for preload: fork a trivial cmd
    def lap(n):
        nonlocal c, t
        a, b = tree_cpu(), time.monotonic()
        print(f"{n}: cpu {a - c:.1f} wall {b - t:.1f}")
        c, t = a, b

    warm.run([sys.executable, "-m", "triptych_cli", "--version"], environment=dict(os.environ), timeout_s=100)
    lap("preload")
    with running_system(is_forked=True) as s:
        lap("up")
        import psutil

        for name, svc in s.services().items():
            p = psutil.Process(svc["pid"])
            for q in [p, *p.children(recursive=True)]:
                ct = q.cpu_times()
                print(
                    "   ",
                    name,
                    q.pid,
                    q.cmdline()[:5],
                    f"own {ct.user + ct.system:.1f} children {ct.children_user + ct.children_system:.1f}",
                )
        s.ask("hi")
        lap("ask")
        print(sorted(x.name for x in s.logs_dir.iterdir()))
        c_ = s.openai
        c_.chat.completions.create(
            model=MODEL.name,
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "s",
                    "schema": {"type": "object", "properties": {"a": {"type": "string"}}},
                },
            },
        )
        lap("structured")
    lap("down")
