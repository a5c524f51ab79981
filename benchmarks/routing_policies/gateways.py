"""A gateway process for each arm, before the same engines: only the choice of an instance differs."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
from comparison.systems import free_port

from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import Role

READY_TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.2
DEPLOYMENT = "default"


@contextlib.contextmanager
def running_gateways(redis_url: str, arms: Mapping[str, Path]) -> Iterator[dict[str, str]]:
    """Base URLs of OpenAI's API by arm, during the block.

    Raises:
        TimeoutError: one of them does not become ready.
    """
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-")))
        urls = {}
        for arm, file in arms.items():
            port = free_port()
            env = {
                **os.environ,
                "TRIPTYCH_REDIS_URL": redis_url,
                "TRIPTYCH_DEPLOYMENT": DEPLOYMENT,
                "TRIPTYCH_INSTANCE": f"gateway-{arm}",
                "TRIPTYCH_HOST": "127.0.0.1",
                "TRIPTYCH_PORT": str(port),
                "TRIPTYCH_ROUTING_FILE": str(file),
            }
            output = stack.enter_context((logs / f"{arm}.log").open("wb"))
            command = [sys.executable, "-m", "triptych_gateway"]
            process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
            stack.callback(_end, process)
            urls[arm] = f"http://127.0.0.1:{port}"
        for arm, url in urls.items():
            _wait_until_ready(url, logs / f"{arm}.log")
        yield {arm: f"{url}/v1" for arm, url in urls.items()}


def urls_of_engines(redis_url: str) -> list[str]:
    """URLs at which prefill_decodes serve their metrics."""
    return asyncio.run(_urls_of_engines(redis_url))


async def _urls_of_engines(redis_url: str) -> list[str]:
    async with await AsyncBus.connect(redis_url, DEPLOYMENT, client_name="bench") as bus:
        records = await Registry(bus).list_instances()
    return [each.url for each in records if each.role is Role.PREFILL_DECODE and each.url is not None]


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(LOOK_EVERY_S)
    raise TimeoutError(f"a gateway is not ready:\n{log.read_text(errors='replace')[-3000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
