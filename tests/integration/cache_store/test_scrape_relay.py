"""The relay: what the store answers at its Unix socket, on a port of another process."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess
from tests.support.waiting import free_port, until, wait_until
from triptych_cache_store.scrape_relay import ScrapeRelay
from triptych_common.runtime import MetricsSettings, scrape_server
from triptych_common.runtime.scrape_server import ScrapeServer

START_LIMIT_S = 60.0


def ask(port: int, target: str = "/metrics", method: str = "GET") -> tuple[int, str]:
    with closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request(method, target)
        response = connection.getresponse()
        return response.status, response.read().decode()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def relay(run_dir: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """As Compose starts it; its port."""
    port = free_port()
    environment = {
        **os.environ,
        "TRIPTYCH_RUN_DIR": str(run_dir),
        "TRIPTYCH_METRICS_SOCKET": str(run_dir / "metrics.sock"),
        "TRIPTYCH_METRICS_PORT": str(port),
    }
    process = subprocess.Popen([sys.executable, "-m", "triptych_cache_store", "relay"], env=environment)
    try:
        wait_until(lambda: listens(port), START_LIMIT_S, "the relay listens")
        yield process, port
    finally:
        process.kill()
        process.wait(timeout=10)


def test_scrapes_go_to_the_store_and_nothing_else_does(
    relay: tuple[subprocess.Popen[bytes], int], make_daemon: Callable[..., StoreProcess], run_dir: Path
) -> None:
    process, port = relay
    assert ask(port) == (503, ""), "no store yet"
    daemon = make_daemon(f"--metrics-socket={run_dir / 'metrics.sock'}")
    wait_until(lambda: ask(port)[0] == 200, START_LIMIT_S, "the store answers")
    assert "triptych_store_bytes" in ask(port)[1]
    assert ask(port, "/metrics?name=x")[0] == 200
    for target, method in (("/", "GET"), ("/metrics", "POST"), ("/metrics/x", "GET")):
        assert ask(port, target, method)[0] == 404, (target, method)
    with socket.create_connection(("127.0.0.1", port)) as rude:
        rude.sendall(b"x" * 100_000)
    assert ask(port)[0] == 200
    daemon.stop()
    assert ask(port) == (503, ""), "the store has ended"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 0


@pytest.mark.parametrize("is_relay", [True, False], ids=["relay", "server"])
async def test_a_scraper_that_does_not_read_is_cut_off(
    is_relay: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not taken would wait for it for ever, with the connection."""
    answer = bytes(64 << 20)  # more than the system's buffers hold

    async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    monkeypatch.setattr(scrape_server, "TIMEOUT_S", 2.0)
    path, port = tmp_path / "metrics.sock", free_port()
    store = await asyncio.start_unix_server(answer_all, str(path))
    relay = ScrapeRelay(path) if is_relay else ScrapeServer(lambda: answer)
    await relay.serve(MetricsSettings(metrics_port=port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    try:
        await until(lambda: relay._num_open == 1)
        await until(lambda: relay._num_open == 0, START_LIMIT_S)
        num_read = 0
        async with asyncio.timeout(START_LIMIT_S):
            try:
                while chunk := await reader.read(1 << 20):
                    num_read += len(chunk)
            except ConnectionError:
                pass
        assert 0 < num_read < len(answer)
    finally:
        writer.close()
        await relay.close()
        store.close()


@pytest.mark.parametrize("missing", ["TRIPTYCH_METRICS_SOCKET", "TRIPTYCH_METRICS_PORT"])
def test_the_relay_refuses_to_start_without_both_of_its_ends(run_dir: Path, missing: str) -> None:
    environment = {
        **os.environ,
        "TRIPTYCH_RUN_DIR": str(run_dir),
        "TRIPTYCH_METRICS_SOCKET": str(run_dir / "metrics.sock"),
        "TRIPTYCH_METRICS_PORT": str(free_port()),
    }
    environment.pop(missing)
    done = subprocess.run(
        [sys.executable, "-m", "triptych_cache_store", "relay"],
        env=environment, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "needs both metrics_socket and metrics_port" in done.stderr
