"""kill -9 of a client: everything it held comes back at once, and its watchers get a push."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.cache_store.samples import SPEC
from tests.support.stores import PushLog, StoreProcess
from triptych_common.protocol.store import (
    EntrySealed,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    WriterLost,
)

HASH, PINNED_HASH = "ab" * 32, "cd" * 32

VICTIM = """
import sys, threading
from triptych_common.protocol.store import *
from triptych_common.store_session import StoreSession
session = StoreSession.connect(sys.argv[1], "encoder-0/worker-0")
spec = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
session.request(Reserve(seq=0, mm_hash="ab" * 32, spec=spec))
session.request(PinOrWatch(seq=0, mm_hash="cd" * 32))
session.request(PinOrWatch(seq=0, mm_hash="ef" * 32))
print("held", flush=True)
threading.Event().wait(60)
"""


def start_victim(socket: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", VICTIM, str(socket)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def test_everything_comes_back_and_watchers_get_a_push(daemon: StoreProcess) -> None:
    pushes = PushLog()
    watcher = daemon.connect("pd-0/engine", on_push=pushes)
    reserved = watcher.request(Reserve(seq=0, mm_hash=PINNED_HASH, spec=SPEC))
    assert isinstance(reserved, Reserved)
    watcher.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    victim = start_victim(daemon.socket)
    watching = watcher.request(PinOrWatch(seq=0, mm_hash=HASH))
    assert getattr(watching, "writing", None) is True
    held = daemon.stats()
    assert (held.num_pins, held.num_reservations, held.num_watches) == (1, 1, 2)

    kill(victim)

    assert pushes.wait_next() == WriterLost(seq=0, mm_hash=HASH)
    stats = daemon.stats()
    assert (stats.num_pins, stats.num_reservations, stats.num_watches) == (0, 0, 1)
    assert stats.free_num_bytes == stats.region_num_bytes - daemon.block_bytes

    # The watch goes on: another writer's seal is pushed.
    other = daemon.connect("encoder-1/worker-0")
    reserved = other.request(Reserve(seq=0, mm_hash=HASH, spec=SPEC))
    assert isinstance(reserved, Reserved)
    other.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    assert isinstance(pushes.wait_next(), EntrySealed)


def test_no_alarm_while_another_reservation_is_left(daemon: StoreProcess) -> None:
    pushes = PushLog()
    watcher = daemon.connect("pd-0/engine", on_push=pushes)
    watcher.request(PinOrWatch(seq=0, mm_hash=HASH))
    victim = start_victim(daemon.socket)
    second = daemon.connect("encoder-1/worker-0")
    reserved = second.request(Reserve(seq=0, mm_hash=HASH, spec=SPEC))
    assert isinstance(reserved, Reserved)
    kill(victim)
    second.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    assert isinstance(pushes.wait_next(), EntrySealed)
    assert pushes.is_empty


def test_the_name_of_a_dead_client_is_free_at_once(daemon: StoreProcess) -> None:
    victim = start_victim(daemon.socket)
    kill(victim)
    daemon.connect("encoder-0/worker-0")
    assert daemon.stats().num_reservations == 0
