"""`python -m triptych_gateway` as a process."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


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


@asynccontextmanager
async def process_of(env: dict[str, str]) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await run_module(env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


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
