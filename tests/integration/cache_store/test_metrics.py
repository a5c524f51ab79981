"""The store's metrics: over the socket of its own, over HTTP, and as the operator's table."""

import contextlib
import re
import socket
import stat
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.stores import PushLog, StoreProcess
from tests.support.waiting import free_port, wait_until
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
from triptych_common.store_session import StoreSession

HASHES = [f"{n:064x}" for n in range(4)]
SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
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
