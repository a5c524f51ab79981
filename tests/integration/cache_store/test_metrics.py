"""The store's metrics: over the socket of its own, over HTTP, and as the operator's table."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.cache_store.samples import SPEC
from tests.support.stores import PushLog, StoreProcess
from tests.support.waiting import free_port, until, wait_until
from triptych_cache_store.scrape_relay import ScrapeRelay
from triptych_cli.commands.store import metric_rows
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.store import (
    MetricsQuery,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StoreMetrics,
    TensorSpec,
)
from triptych_common.runtime import MetricsSettings, scrape_server
from triptych_common.runtime.scrape_server import ScrapeServer
from triptych_common.store_session import StoreSession

HASHES = [f"{n:064x}" for n in range(4)]
HUGE = TensorSpec(shape=(1 << 20, 1 << 10), dtype="float32", num_bytes=1 << 32)


def put(session: StoreSession, mm_hash: str) -> None:
    reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
    assert isinstance(reserved, Reserved)
    session.request(Seal(seq=0, reservation_id=reserved.reservation_id))


def samples(text: str) -> dict[str, float]:
    """By name and label values."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[" ".join([sample.name.removeprefix("triptych_store_"), *sample.labels.values()])] = (
                sample.value
            )
    return found


def scrape(path: Path, target: str = "/metrics") -> tuple[int, str]:
    connection = HTTPConnection("localhost", timeout=5)
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(str(path))
    connection.request("GET", target)
    response = connection.getresponse()
    try:
        return response.status, response.read().decode()
    finally:
        response.close()
        connection.close()


def test_what_happened_is_counted(make_daemon: Callable[..., StoreProcess], run_dir: Path) -> None:
    path = run_dir / "metrics.sock"
    daemon = make_daemon(f"--metrics-socket={path}")
    pushes = PushLog()
    session = daemon.connect("client", on_push=pushes)
    session.request(PinOrWatch(seq=0, mm_hash=HASHES[0]))
    put(session, HASHES[0])  # pinned by its seal
    pushes.wait_next()
    put(session, HASHES[1])
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=HASHES[1])), Pinned)
    session.request(PinOrWatch(seq=0, mm_hash=HASHES[1]))  # not the first pin
    assert isinstance(session.request(Reserve(seq=0, mm_hash=HASHES[2], spec=SPEC)), Reserved)
    with pytest.raises(StoreError, match="exceed"):
        session.request(Reserve(seq=0, mm_hash=HASHES[3], spec=HUGE))

    reply = session.request(MetricsQuery(seq=0))
    assert isinstance(reply, StoreMetrics)
    status, text = scrape(path)
    assert status == 200
    ages = re.compile(r"^triptych_store_oldest.*$", re.MULTILINE)
    assert ages.sub("", text) == ages.sub("", reply.text)
    found = samples(text)
    assert found["bytes pinned"] == 2 * 65536
    assert found["bytes writing"] == 65536
    stats = daemon.stats()
    assert sum(found[f"bytes {state}"] for state in ("free", "writing", "ready", "pinned", "abandoned")) == (
        stats.region_num_bytes
    )
    assert (found["entries"], found["reservations"], found["pins"], found["sessions"]) == (2, 1, 3, 1)
    assert (found["seals_total"], found["hits_total"], found["misses_total"]) == (2, 2, 1)
    assert found["refusals_total reserve too_large"] == 1
    assert found["seal_to_pin_seconds_count"] == 2
    assert found["oldest_lease_seconds"] > 0
    rows = dict(metric_rows(text))
    assert rows["bytes pinned"] == "128.0 KiB"
    assert rows["refusals reserve too_large"] == "1"
    assert rows["seal to pin"] == "2"
    assert rows["seal to pin, 99% of them"].startswith("≤")


def test_the_socket_is_the_owners_and_goes_with_the_store(
    make_daemon: Callable[..., StoreProcess], run_dir: Path
) -> None:
    path = run_dir / "metrics.sock"
    daemon = make_daemon(f"--metrics-socket={path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert scrape(path, "/")[0] == 404
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(path))
        rude.sendall(b"x" * 100_000)
    assert scrape(path)[0] == 200
    assert daemon.stop() == 0
    assert not path.exists()


def connects(connection: HTTPConnection) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        connection.connect()
    return connection.sock is not None


def test_a_port_of_this_host(make_daemon: Callable[..., StoreProcess]) -> None:
    port = free_port()
    make_daemon(f"--metrics-port={port}")
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    wait_until(lambda: connects(connection), 60, "it listens")
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert b"triptych_store_bytes" in response.read()
    connection.close()


# ---- the relay: what the store answers at its Unix socket, on a port of another process ----------
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
    """Run the relay as Compose starts it; yield its process and port."""
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
    """The rest of the answer would otherwise wait for ever, with the connection."""
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
