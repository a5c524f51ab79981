"""Many entries, many clients: everything is found and accounted for. Times: benchmarks/store_latency.py."""

from collections.abc import Callable

import pytest

from tests.integration.cache_store.samples import SPEC
from tests.support.stores import StoreProcess
from triptych_common.protocol.store import (
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    Unpin,
    Verified,
    Verify,
)

NUM_ENTRIES = 20_000
NUM_CLIENTS = 32


@pytest.mark.slow
def test_everything_is_found_and_accounted_for(make_daemon: Callable[..., StoreProcess]) -> None:
    daemon = make_daemon(region_bytes=NUM_ENTRIES * 5000, block_bytes=4096)
    sessions = [daemon.connect(f"client-{number}/w") for number in range(NUM_CLIENTS)]
    hashes = [f"{number:064x}" for number in range(NUM_ENTRIES)]
    offsets: dict[str, int] = {}
    for start in range(0, NUM_ENTRIES, 500):
        pending = [
            (n, sessions[n % NUM_CLIENTS].submit(Reserve(seq=0, mm_hash=hashes[n], spec=SPEC)))
            for n in range(start, start + 500)
        ]
        seals = []
        for n, each in pending:
            reserved = each.result(30)
            assert isinstance(reserved, Reserved)
            offsets[hashes[n]] = reserved.offset
            seal = Seal(seq=0, reservation_id=reserved.reservation_id)
            seals.append(sessions[n % NUM_CLIENTS].submit(seal))
        for done in seals:
            done.result(30)
    assert len(set(offsets.values())) == NUM_ENTRIES
    assert daemon.stats().num_entries == NUM_ENTRIES
    for number in range(0, NUM_ENTRIES, 97):
        session = sessions[number % NUM_CLIENTS]
        pinned = session.request(PinOrWatch(seq=0, mm_hash=hashes[number]))
        assert isinstance(pinned, Pinned)
        assert pinned.descriptor.offset == offsets[hashes[number]]
        session.request(Unpin(seq=0, pin_id=pinned.pin_id))
    verified = sessions[0].request(Verify(seq=0), timeout_s=60)
    assert isinstance(verified, Verified)
    assert (verified.num_recorded, verified.num_damaged) == (NUM_ENTRIES, 0)
    sessions[0].request(Evict(seq=0), timeout_s=60)
    stats = daemon.stats()
    assert (stats.num_entries, stats.free_num_bytes) == (0, stats.region_num_bytes)
