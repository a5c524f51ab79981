import json
import shlex
import time

import psutil
import pytest
from costplug import tree_cpu

from tests.engine.test_families import DTYPE_OPTION, LENGTHS
from tests.support.families.folders import family_folder
from tests.support.families.registry import FAMILIES
from tests.support.real.system import *
from tests.support.real.warm import client as warm


@pytest.mark.parametrize("name,small", [("gemma3", 0), ("gemma3", 1), ("qwen2_vl", 0), ("qwen2_vl", 1)])
def test_start(tmp_path, name, small):
    c = tree_cpu()
    t = time.monotonic()

    def lap(n):
        nonlocal c, t
        a, b = tree_cpu(), time.monotonic()
        print(f"{n}: cpu {a - c:.1f} wall {b - t:.1f}", flush=True)
        c, t = a, b

    warm.server()
    warm.run([sys.executable, "-m", "triptych_cli", "--version"], environment=dict(os.environ), timeout_s=100)
    lap("preload")
    model = family_folder(name)
    lap("folder")
    dummies = []
    if small:
        dummies = [
            "--limit-mm-per-prompt="
            + json.dumps(
                {
                    k.value: {
                        "count": 9,
                        "width": 56,
                        "height": 56,
                        **({"num_frames": 4} if k.value == "video" else {}),
                    }
                    for k in FAMILIES[name].limits
                    if k.value != "audio"
                }
            )
        ]
    with running_system(
        f"--encoder-args={shlex.join([DTYPE_OPTION, *FAMILIES[name].engine_options, *dummies])}",
        f"--prefill-decode-args={shlex.join([DTYPE_OPTION, *LENGTHS])}",
        model=model,
        is_forked=True,
    ) as s:
        lap(f"up {name} {small}")
        for n, svc in s.services().items():
            p = psutil.Process(svc["pid"])
            for q in [p, *p.children(recursive=True)]:
                ct = q.cpu_times()
                print(
                    "   ",
                    n,
                    q.pid,
                    f"own {ct.user + ct.system:.1f} children {ct.children_user + ct.children_system:.1f}",
                )
    lap("down")
