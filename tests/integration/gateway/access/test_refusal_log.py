"""What callers without a key make a gateway log: bounded, however many they are."""

import asyncio
import socket
import sys
from pathlib import Path

import httpx
import orjson

from tests.support.gateway.process import environment
from tests.support.waiting import free_port, until_async
from triptych_common.telemetry.logs import BURST

NUM_REQUESTS = 10 * BURST
UPGRADE = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: upgrade, close\r\nUpgrade: x\r\n\r\n"


async def test_refusals_write_a_bounded_number_of_lines(redis_url: str, tmp_path: Path) -> None:
    port, log_file = free_port(), tmp_path / "log"
    env = environment(redis_url, tmp_path, port) | {"TRIPTYCH_API_KEYS": '["secret"]'}
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "triptych_gateway", env=env, stdout=log, stderr=log
        )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:

            async def answers() -> bool:
                try:
                    return (await http.get("/health/live")).status_code == 200
                except httpx.TransportError:
                    return False

            await until_async(answers)
            for _ in range(NUM_REQUESTS):
                answer = await http.post("/v1/completions", json={})
                assert answer.status_code == 401
            for _ in range(NUM_REQUESTS):
                await send(port, b"no HTTP\r\n\r\n")
                await send(port, UPGRADE)
    finally:
        process.kill()
        await process.wait()
    lines = [orjson.loads(line) for line in log_file.read_bytes().splitlines()]
    texts = [line["text"] for line in lines]
    assert texts.count("request refused") == BURST
    assert texts.count("connection refused") == BURST
    assert len(lines) < 3 * BURST, lines[-1]


async def send(port: int, data: bytes) -> None:
    """On a connection of its own, to the end of its answer."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", port))
        await loop.sock_sendall(client, data)
        while await loop.sock_recv(client, 4096):
            pass
