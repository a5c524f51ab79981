"""Connections without a request, without a key: more of them than files may be open."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment
from tests.support.gateway.samples import MODEL
from tests.support.gateway.system import System
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus

HARD_LIMIT = 1024  # files
NUM_FLOOD = 1100
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def flood(port: int, number: int) -> AsyncIterator[list[socket.socket]]:
    """Open connections on which nothing is sent."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in made:
            each.setblocking(False)
            await loop.sock_connect(each, ("127.0.0.1", port))
        yield made


async def test_callers_are_served_beside_more_idle_connections_than_files(
    redis_url: str, tmp_path: Path
) -> None:
    port = free_port()
    env = environment(redis_url, tmp_path, port) | {
        "TRIPTYCH_MAX_REQUESTS_IN_FLIGHT": "16",
        "TRIPTYCH_HEADER_TIMEOUT_S": "600",  # until then nothing else ends them
    }
    gateway = f"ulimit -S -n 512; ulimit -H -n {HARD_LIMIT}; exec {sys.executable} -m triptych_gateway"
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", gateway, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        async with (
            await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
            FakePrefillDecode().running(bus),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http,
        ):

            async def is_ready() -> bool:
                try:
                    return (await http.get("/health/ready")).status_code == 200
                except httpx.TransportError:
                    return False

            await until_async(is_ready)
            async with flood(port, NUM_FLOOD):
                for _ in range(3):
                    limits = httpx.Limits(max_keepalive_connections=0)
                    async with httpx.AsyncClient(
                        base_url=http.base_url, trust_env=False, timeout=20, limits=limits
                    ) as fresh:
                        assert (await fresh.get("/health/live")).status_code == 200
                        assert (await fresh.post("/v1/chat/completions", json=BODY)).status_code == 200
    finally:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("system", [{"max_idle_connections": 16}], indirect=True)
async def test_a_flood_ends_no_connection_that_is_in_use(system: System) -> None:
    system.prefill_decode.behaviour = "stall"
    stream = await system.ask("x", stream=True)
    await system.http.get("/health/live")
    async with flood(system.gateway.settings.port, 100) as made:
        assert await asyncio.get_running_loop().sock_recv(made[0], 1) == b""  # the oldest has ended
        system.prefill_decode.release.set()
        words = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert "".join(words).split() == ["word0", "word1", "word2"]
        assert (await system.http.get("/health/live")).status_code == 200
        await until(lambda: len(system.server.server_state.connections) <= 17)
