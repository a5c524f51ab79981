"""Processes that are compared, and their upstream. Each arm has one core, load and upstream another."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway_bench.upstream import MODEL
from tests.conftest import embedded_redis
from tests.support.process_ends import end_process
from triptych_cli.system.machine import free_ports
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role

FOLDER = Path(__file__).resolve().parents[1]
DIGEST = "f" * 64
START_LIMIT_S = 30.0
DIRECT, PROXY, GATEWAY = "direct", "aiohttp proxy", "gateway"


@dataclass(frozen=True)
class Arm:
    """One way to the upstream, with its process."""

    name: str
    url: str
    pid: int | None  # None: there is no process between

    def cpu_s(self) -> float:
        """CPU seconds of all threads of the arm, as the scheduler counts them."""
        if self.pid is None:
            return 0.0
        tasks = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(each.read_text().split()[0]) for each in tasks) / 1e9


def cores() -> tuple[int, int]:
    """One core for the arms, and another for load and upstream; the same if there is only one."""
    usable = sorted(os.sched_getaffinity(0))
    return usable[0], usable[-1]


@asynccontextmanager
async def running_arms(
    others: Mapping[str, Path], settings: Mapping[str, str] | None = None
) -> AsyncIterator[list[Arm]]:
    """Run an upstream, a proxy, a gateway of this checkout, and one of each of `others`.

    `settings` is added to the gateways' environment.
    """
    arm_core, load_core = cores()
    os.sched_setaffinity(0, {load_core})
    upstream_port, proxy_port, *gateway_ports = free_ports(3 + len(others))
    upstream_url = f"http://127.0.0.1:{upstream_port}"
    sources = {GATEWAY: FOLDER.parent, **others}
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="gateway-cost-") as folder:
        redis_url = held.enter_context(embedded_redis()).url
        held.enter_context(process(["-m", "gateway_bench.upstream", str(upstream_port)], load_core))
        proxy = held.enter_context(
            process(["-m", "gateway_bench.proxy", str(proxy_port), upstream_url], arm_core)
        )
        arms = [Arm(DIRECT, upstream_url, None), Arm(PROXY, f"http://127.0.0.1:{proxy_port}", proxy.pid)]
        async with AsyncExitStack() as services:
            bus = await services.enter_async_context(
                await AsyncBus.connect(redis_url, "default", client_name="benchmark")
            )
            record = InstanceRecord(
                instance="pd-0",
                boot_id="boot",
                role=Role.PREFILL_DECODE,
                model=MODEL,
                namespace_digest=DIGEST,
                url=upstream_url,
                num_slots=64,
            )
            await services.enter_async_context(Registry(bus).keep_registered(record))
            for index, ((name, checkout), port) in enumerate(
                zip(sources.items(), gateway_ports, strict=True)
            ):
                run_dir = Path(folder) / f"run-{index}"
                run_dir.mkdir(mode=0o700)
                environment = {
                    "PYTHONPATH": source_path(checkout),
                    "TRIPTYCH_REDIS_URL": redis_url,
                    "TRIPTYCH_RUN_DIR": str(run_dir),
                    "TRIPTYCH_PORT": str(port),
                    "TRIPTYCH_INSTANCE": f"gateway-{index}",
                    "TRIPTYCH_LOG_LEVEL": "warning",
                    **(settings or {}),
                }
                gateway = held.enter_context(process(["-m", "triptych_gateway"], arm_core, environment))
                arms.append(Arm(name, f"http://127.0.0.1:{port}", gateway.pid))
                await until_ready(f"http://127.0.0.1:{port}/health/ready", gateway)
            yield arms


def source_path(checkout: Path) -> str:
    """PYTHONPATH for the packages of a checkout."""
    return os.pathsep.join(map(str, sorted(checkout.glob("*/*/src"))))


@contextmanager
def process(
    arguments: list[str], core: int, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=FOLDER,
        env={**os.environ, **(environment or {})},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509 - no threads yet
    )
    try:
        yield running
    finally:
        end_process(running)


async def until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_LIMIT_S), httpx.AsyncClient(trust_env=False) as http:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the process at {url} ended with {process.returncode}")
            try:
                if (await http.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            await asyncio.sleep(0.1)
