"""Checksums of sealed tensors: taken in the background, checked on demand and after a restart."""

import re
import signal
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.stores import StoreProcess
from triptych_common.protocol.store import (
    Descriptor,
    EntryFault,
    MetricsQuery,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StoreMetrics,
    TensorSpec,
    Unpin,
    Verified,
    Verify,
    Watching,
)
from triptych_common.region import RegionMapping
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.store_session import StoreSession

HASHES = [f"{n:064x}" for n in range(40)]
MIB = 1 << 20


def spec_of(num_bytes: int) -> TensorSpec:
    return TensorSpec(shape=(num_bytes // 64, 16), dtype="float32", num_bytes=num_bytes)


def put(session: StoreSession, mm_hash: str, num_bytes: int = 4096) -> None:
    reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec_of(num_bytes)))
    assert isinstance(reserved, Reserved)
    mapping_of(session).view(reserved.offset, num_bytes)[:] = mm_hash.encode() * (num_bytes // 64)
    session.request(Seal(seq=0, reservation_id=reserved.reservation_id))


def mapping_of(session: StoreSession) -> RegionMapping:
    return RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes, populate=False)


def pin(session: StoreSession, mm_hash: str) -> Pinned:
    pinned = session.request(PinOrWatch(seq=0, mm_hash=mm_hash))
    assert isinstance(pinned, Pinned)
    return pinned


def damage(session: StoreSession, descriptor: Descriptor) -> None:
    """A bit flips."""
    last = mapping_of(session).view(descriptor.offset + descriptor.spec.num_bytes - 1, 1)
    last[0] ^= 1


def verify(session: StoreSession, *, evict: bool = False) -> Verified:
    verified = session.request(Verify(seq=0, evict=evict), timeout_s=30)
    assert isinstance(verified, Verified)
    return verified


def metric(session: StoreSession, name: str) -> float:
    reply = session.request(MetricsQuery(seq=0))
    assert isinstance(reply, StoreMetrics)
    found = re.search(rf"^triptych_store_{re.escape(name)} (\S+)$", reply.text, re.MULTILINE)
    assert found is not None, reply.text
    return float(found[1])


def wait_checked(session: StoreSession) -> None:
    """All checksums that were to be taken in the background are there."""
    deadline = time.monotonic() + 60
    while metric(session, "unchecked_entries") or verify(session).num_recorded:
        assert time.monotonic() < deadline


def test_verify_takes_checksums_and_finds_what_changed(daemon: StoreProcess) -> None:
    session = daemon.connect("operator")
    for mm_hash in HASHES:
        put(session, mm_hash)
    first = verify(session)
    assert (first.num_recorded, first.num_intact, first.num_damaged) == (40, 0, 0)
    assert first.num_bytes == 40 * 4096
    for mm_hash in HASHES[:2]:
        held = pin(session, mm_hash)
        damage(session, held.descriptor)
        if mm_hash == HASHES[1]:
            session.request(Unpin(seq=0, pin_id=held.pin_id))
        else:
            pin_id = held.pin_id
    found = verify(session)
    assert (found.num_recorded, found.num_intact, found.num_damaged) == (0, 38, 2)
    assert set(found.damaged) == {
        EntryFault(mm_hash=HASHES[0], fault="checksum", num_pins=1),
        EntryFault(mm_hash=HASHES[1], fault="checksum", num_pins=0),
    }
    verify(session, evict=True)
    assert isinstance(session.request(PinOrWatch(seq=0, mm_hash=HASHES[1])), Watching)
    assert daemon.stats().num_entries == 39
    session.request(Unpin(seq=0, pin_id=pin_id))  # it was in use; now it goes
    assert daemon.stats().num_entries == 38
    assert verify(session).num_damaged == 0


def test_a_damaged_header_is_found(daemon: StoreProcess) -> None:
    session = daemon.connect("operator")
    put(session, HASHES[7])
    memory = mapping_of(session).view(0, session.welcome.region_num_bytes)
    at = bytes(memory[: 1 << 20]).index(bytes.fromhex(HASHES[7]), 4096)
    memory[at] ^= 1
    found = verify(session, evict=True)
    assert found.damaged == (EntryFault(mm_hash=HASHES[7], fault="header"),)
    assert daemon.stats().num_entries == 0
    assert daemon.stats().free_num_bytes == daemon.stats().region_num_bytes


def test_without_the_option_nothing_is_read(daemon: StoreProcess) -> None:
    session = daemon.connect("writer")
    put(session, HASHES[0])
    session.request(Ping(seq=0))
    assert verify(session).num_recorded == 1


def test_a_restarted_store_drops_what_changed(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--verify=adopt")
    writer = daemon.connect("writer")
    for mm_hash in HASHES[:4]:
        put(writer, mm_hash)
    wait_checked(writer)
    held = pin(writer, HASHES[0])
    for mm_hash in HASHES[:2]:
        damage(writer, pin(writer, mm_hash).descriptor)
    writer.close()
    keeper = daemon.connect("keeper", reconnect_timeout_s=20)
    held = pin(keeper, HASHES[0])
    daemon.stop(signal.SIGKILL)
    daemon.start()
    assert '"num_damaged": 2' in daemon.log() or '"num_damaged":2' in daemon.log()
    assert isinstance(keeper.request(PinOrWatch(seq=0, mm_hash=HASHES[1])), Watching)
    assert verify(keeper).damaged == (EntryFault(mm_hash=HASHES[0], fault="checksum", num_pins=1),)
    keeper.request(Unpin(seq=0, pin_id=held.pin_id))
    assert daemon.stats().num_entries == 2


def test_always_checks_again_by_itself(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--verify=always", "--verify-interval-s=0.1")
    session = daemon.connect("writer")
    put(session, HASHES[0])
    wait_checked(session)
    held = pin(session, HASHES[0])
    damage(session, held.descriptor)
    session.request(Unpin(seq=0, pin_id=held.pin_id))
    deadline = time.monotonic() + 60
    while daemon.stats().num_entries:
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    assert "entry is damaged" in daemon.log()


def test_requests_that_pile_up_are_refused(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon(region_bytes=300 * MIB)
    session = daemon.connect("operator")
    for mm_hash in HASHES[:4]:
        put(session, mm_hash, 32 * MIB)
    pending = [session.submit(Verify(seq=0)) for _ in range(40)]
    kinds = [each.result(60).kind for each in pending]
    assert set(kinds) == {"verified", "failure"}
    assert kinds.count("verified") >= 16


@pytest.mark.parametrize("kill", [False, True])
def test_the_store_answers_others_meanwhile(make_daemon: Callable[..., StoreProcess], kill: bool) -> None:
    daemon = make_daemon(region_bytes=300 * MIB)
    session = daemon.connect("operator")
    for mm_hash in HASHES[:4]:
        put(session, mm_hash, 64 * MIB)
    pending = session.submit(Verify(seq=0))
    if kill:  # the end does not wait for it
        started_at = time.monotonic()
        assert daemon.stop() == 0
        assert time.monotonic() - started_at < 60
        return
    num_pings = 0
    while not pending.done():
        session.request(Ping(seq=0), timeout_s=5)
        num_pings += 1
    assert isinstance(pending.result(), Verified)
    assert num_pings > 3


def test_bytes_in_redis_are_not_the_regions(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon("--verify=always")
    session = daemon.connect("encoder-0/worker-0")
    for number, memory in enumerate(("redis", "shm")):
        reserved = session.request(
            Reserve(seq=0, mm_hash=f"{number:064x}", spec=tensor_spec(torch.ones(4, 4)), memory=memory)
        )
        assert isinstance(reserved, Reserved)
        session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    verified = session.request(Verify(seq=0, evict=True))
    assert isinstance(verified, Verified)
    assert (verified.num_intact + verified.num_recorded, verified.num_damaged) == (1, 0)
