"""kill -9 of the store: sealed entries are recovered, clients come back by themselves with what they held."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.cache_store.samples import SPEC, mapping_of, put
from tests.support.faults.resets import LIMIT_S, LOOPS, Asyncio, Uvloop, resetting_server, show_connections
from tests.support.stores import PushLog, StoreProcess
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import (
    AlreadySealed,
    Done,
    EntrySealed,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    TensorSpec,
    Unpin,
    Watching,
    Welcome,
    WriterLost,
)
from triptych_common.region.tensor_view import tensor_spec, tensor_view
from triptych_common.store_session import AsyncStoreSession, StoreSession

HASHES = [f"{n:064x}" for n in range(10)]


def reserve(session: StoreSession, mm_hash: str, spec: TensorSpec = SPEC) -> Reserved:
    reply = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec))
    assert isinstance(reply, Reserved)
    return reply


def restart(daemon: StoreProcess) -> None:
    daemon.stop(signal.SIGKILL)
    daemon.start()


def test_what_a_living_client_holds_survives(daemon: StoreProcess) -> None:
    welcomes: list[Welcome] = []
    pushes = PushLog()
    engine = daemon.connect(
        "pd-0/engine", on_push=pushes, on_reconnect=welcomes.append, reconnect_timeout_s=20
    )
    encoder = daemon.connect("encoder-0/worker-0", reconnect_timeout_s=20)
    generation = engine.welcome.generation
    tensors = [torch.randn(100, 64) for _ in range(3)]
    for mm_hash, tensor in zip(HASHES, tensors, strict=False):
        put(encoder, mm_hash, tensor)
    pinned = engine.request(PinOrWatch(seq=0, mm_hash=HASHES[0], num_holders=2))
    assert isinstance(pinned, Pinned)
    view = tensor_view(mapping_of(engine), pinned.descriptor)
    unsealed = reserve(encoder, HASHES[5])
    assert isinstance(engine.request(PinOrWatch(seq=0, mm_hash=HASHES[5])), Watching)

    restart(daemon)

    assert torch.equal(view, tensors[0])
    assert isinstance(engine.request(Unpin(seq=0, pin_id=pinned.pin_id)), Done)  # waits for the reconnect
    assert welcomes[0].generation > generation
    stats = daemon.stats()
    assert (stats.num_entries, stats.num_pins, stats.num_reservations) == (3, 1, 1)
    again = engine.request(PinOrWatch(seq=0, mm_hash=HASHES[1]))
    assert isinstance(again, Pinned)
    assert again.descriptor.generation == generation
    assert torch.equal(tensor_view(mapping_of(engine), again.descriptor), tensors[1])
    # The reservation from before is sealed after, and the watch from before gets its push.
    assert isinstance(encoder.request(Seal(seq=0, reservation_id=unsealed.reservation_id)), Done)
    push = pushes.wait_next()
    assert isinstance(push, EntrySealed)
    assert push.descriptor.mm_hash == HASHES[5]
    assert isinstance(
        encoder.request(Reserve(seq=0, mm_hash=HASHES[2], spec=tensor_spec(tensors[2]))), AlreadySealed
    )
    assert reserve(encoder, HASHES[6]).generation == welcomes[0].generation


HOLDER = """
import sys, threading
from triptych_common.protocol.store import *
from triptych_common.store_session import StoreSession
session = StoreSession.connect(sys.argv[1], "pd-1/engine", reconnect_timeout_s=30)
spec = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
reserved = session.request(Reserve(seq=0, mm_hash="ab" * 32, spec=spec))
session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
session.request(PinOrWatch(seq=0, mm_hash="ab" * 32))
session.request(Reserve(seq=0, mm_hash="cd" * 32, spec=spec))
print("held", flush=True)
threading.Event().wait(60)
"""


def start_holder(socket: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(socket)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_what_a_client_held_that_died_meanwhile_is_free(daemon: StoreProcess) -> None:
    holder = start_holder(daemon.socket)
    daemon.stop(signal.SIGKILL)
    holder.kill()
    holder.communicate(timeout=10)
    daemon.start()
    stats = daemon.stats()
    assert (stats.num_entries, stats.num_pins, stats.num_reservations) == (1, 0, 0)
    assert stats.ready_num_bytes + stats.free_num_bytes == stats.region_num_bytes


def test_a_client_that_is_stopped_keeps_what_it_holds_until_it_dies(daemon: StoreProcess) -> None:
    """It cannot come back while it is stopped, but it may still write: nothing of it is given away."""
    holder = start_holder(daemon.socket)
    os.kill(holder.pid, signal.SIGSTOP)
    restart(daemon)
    stats = daemon.stats()
    assert (stats.num_pins, stats.num_reservations) == (1, 1)
    pushes = PushLog()
    watcher = daemon.connect("pd-0/engine", on_push=pushes)
    watching = watcher.request(PinOrWatch(seq=0, mm_hash="cd" * 32))
    assert isinstance(watching, Watching)
    assert watching.writing
    holder.kill()
    holder.communicate(timeout=10)
    assert pushes.wait_next() == WriterLost(seq=0, mm_hash="cd" * 32)
    stats = daemon.stats()
    assert (stats.num_pins, stats.num_reservations) == (0, 0)


def test_without_reconnect_the_session_ends(daemon: StoreProcess) -> None:
    done = threading.Event()
    session = daemon.connect("pd-0/engine", on_disconnect=lambda error: done.set())
    put(session, HASHES[0], torch.zeros(4, 4))
    restart(daemon)
    assert done.wait(5)
    with pytest.raises(StoreUnavailableError):
        session.request(PinOrWatch(seq=0, mm_hash=HASHES[0]))
    assert daemon.stats().num_entries == 1
    daemon.connect("pd-0/engine")


def test_a_clean_stop_removes_the_region_and_with_it_the_leases(daemon: StoreProcess) -> None:
    ended: list[Exception | None] = []
    done = threading.Event()

    def on_disconnect(error: Exception | None) -> None:
        ended.append(error)
        done.set()

    session = daemon.connect("pd-0/engine", on_disconnect=on_disconnect, reconnect_timeout_s=20)
    put(session, HASHES[0], torch.ones(4, 4))
    pinned = session.request(PinOrWatch(seq=0, mm_hash=HASHES[0]))
    assert isinstance(pinned, Pinned)
    view = tensor_view(mapping_of(session), pinned.descriptor)
    daemon.stop()
    daemon.start()
    assert done.wait(10)
    assert getattr(ended[0], "code", None) == "lease_lost"
    assert torch.equal(view, torch.ones(4, 4))
    assert daemon.stats().num_entries == 0


def test_a_clean_stop_can_keep_the_region(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--keep-region")
    session = daemon.connect("pd-0/engine", reconnect_timeout_s=20)
    put(session, HASHES[0], torch.ones(4, 4))
    daemon.stop()
    daemon.start()
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=HASHES[0])), Pinned)


def test_a_clean_stop_that_keeps_the_region_ends_no_lease(
    make_daemon: Callable[..., StoreProcess],
) -> None:
    """SIGTERM under load: what is pinned stays pinned, what is being written is sealed at the next store."""
    daemon = make_daemon("--keep-region")
    session = daemon.connect("pd-0/engine", reconnect_timeout_s=20)
    put(session, HASHES[0], torch.ones(4, 4))
    pinned = session.request(PinOrWatch(seq=0, mm_hash=HASHES[0]))
    assert isinstance(pinned, Pinned)
    reserved = reserve(session, HASHES[1])
    assert daemon.stop() == 0
    assert '"level":"error"' not in daemon.log()
    daemon.start()
    assert isinstance(session.request(Seal(seq=0, reservation_id=reserved.reservation_id)), Done)
    assert (daemon.stats().num_pins, daemon.stats().num_entries) == (1, 2)
    assert isinstance(session.request(Unpin(seq=0, pin_id=pinned.pin_id)), Done)


def test_entries_of_another_namespace_are_dropped_at_start(
    make_daemon: Callable[..., StoreProcess], run_dir: Path
) -> None:
    daemon = make_daemon()
    for index, digest in enumerate(["old", "new"]):
        put(daemon.connect(f"encoder-{index}", namespace_digest=digest), HASHES[index], torch.zeros(4, 4))
    daemon.stop(signal.SIGKILL)
    second = StoreProcess(run_dir, "--namespace-digest=new")
    second.start()
    session = second.connect("pd-0/engine")
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=HASHES[1])), Pinned)
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=HASHES[0])), Watching)
    second.close()


async def test_the_asyncio_session_comes_back_too(daemon: StoreProcess) -> None:
    welcomes: list[Welcome] = []
    async with await AsyncStoreSession.connect(
        daemon.socket, "encoder-0/host", on_reconnect=welcomes.append, reconnect_timeout_s=20
    ) as session:
        reserved = await session.request(Reserve(seq=0, mm_hash=HASHES[0], spec=SPEC))
        assert isinstance(reserved, Reserved)
        restart(daemon)
        await session.request(Seal(seq=0, reservation_id=reserved.reservation_id), timeout_s=20)
        assert isinstance(await session.request(PinOrWatch(seq=0, mm_hash=HASHES[0])), Pinned)
        assert len(welcomes) == 1


@pytest.mark.parametrize("loop", LOOPS)
def test_it_is_unavailable(loop: type[Uvloop | Asyncio], tmp_path: Path) -> None:
    async def lose(transport: asyncio.Transport, protocol: Any) -> None:
        server.reset()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait([protocol._welcomed])  # which reports its loss
        assert transport.is_closing()

    async def connect() -> None:
        with pytest.raises(StoreUnavailableError, match="closed the session at hello"):
            await AsyncStoreSession.connect(path, "encoder-0/host")

    path = tmp_path / "store.sock"
    with resetting_server(answers=False, path=path) as server, asyncio.Runner(loop_factory=loop) as runner:
        show_connections(runner, lose)
        runner.run(connect())
