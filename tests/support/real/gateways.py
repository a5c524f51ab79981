"""One more gateway for a running system, with settings of its own; it has no engine, so it starts soon."""

import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

from tests.support.real.system import System
from tests.support.waiting import free_port, wait_until

START_LIMIT_S = 60.0
STOP_LIMIT_S = 60.0


@contextlib.contextmanager
def another_gateway(system: System, name: str, **env: str) -> Iterator[System]:
    """`system` as it is reached by the new gateway, until the block ends."""
    port = free_port()
    own = {
        "TRIPTYCH_INSTANCE": name,
        "TRIPTYCH_PORT": str(port),
        "TRIPTYCH_REDIS_URL": f"unix://{system.run_dir / 'redis.sock'}",
        "TRIPTYCH_TRACES_DIR": str(system.traces_dir),
    }
    with (system.state_dir / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "triptych_gateway"],
            env={**system.env, **own, **env}, stdout=output, stderr=output,
        )  # fmt: skip
        try:
            wait_until(lambda: _is_ready(port), START_LIMIT_S, f"{name} is ready")
            yield replace(system, base_url=f"http://127.0.0.1:{port}/v1")
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT_S)
            finally:
                process.kill()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
