"""A gateway as a service: in a process of its own, or beside the test in its event loop."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.waiting import free_port, until_async
from triptych_common.runtime import StopSignal
from triptych_gateway.service import run
from triptych_gateway.settings import GatewaySettings


def environment(redis_url: str, run_dir: Path, port: int) -> dict[str, str]:
    run_dir.chmod(0o700)
    return os.environ | {
        "TRIPTYCH_REDIS_URL": redis_url,
        "TRIPTYCH_RUN_DIR": str(run_dir),
        "TRIPTYCH_PORT": str(port),
        "TRIPTYCH_REGISTRY_INTERVAL_S": "0.1",
        "TRIPTYCH_DRAIN_TIMEOUT_S": "5",
    }


async def run_module(*arguments: str, env: dict[str, str]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "triptych_gateway",
        *arguments,
        env=env,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )


async def until_status(http: httpx.AsyncClient, status: int) -> None:
    """Return once `/health/ready` answers with `status`."""

    async def has_status() -> bool:
        try:
            return (await http.get("/health/ready")).status_code == status
        except httpx.HTTPError:
            return False

    await until_async(has_status)


@asynccontextmanager
async def process_of(env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await run_module(env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@dataclass(frozen=True)
class Service:
    """`triptych_gateway.service.run` as a task: as quick as a test's own loop, without a process' start."""

    http: httpx.AsyncClient
    stop: StopSignal
    task: asyncio.Task[None]

    async def wait_ended(self) -> None:
        async with asyncio.timeout(60):
            await self.task


@asynccontextmanager
async def service_of(redis_url: str, run_dir: Path, **changes: Any) -> AsyncIterator[Service]:
    """It serves, and drains at the end of the block at the latest."""
    run_dir.chmod(0o700)  # noqa: ASYNC240
    values: dict[str, Any] = {
        "redis_url": redis_url, "run_dir": run_dir, "port": free_port(), "registry_interval_s": 0.1,
        "drain_grace_s": 0.0, "drain_timeout_s": 60.0,
    }  # fmt: skip
    settings = GatewaySettings(**(values | changes))
    stop = StopSignal()
    async with httpx.AsyncClient(base_url=settings.local_urls[0], trust_env=False, timeout=60) as http:
        task = asyncio.get_running_loop().create_task(run(settings, stop))
        try:
            await until_status(http, 200)
            yield Service(http, stop, task)
        finally:
            stop.set("SIGTERM")
            await asyncio.wait({task})
            gc.unfreeze()  # the service freezes what there is at its start


async def exit_code(*arguments: str, env: dict[str, str]) -> int | None:
    process = await run_module(*arguments, env=env)
    try:
        async with asyncio.timeout(60):
            await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    return process.returncode
