"""Many entries, many clients: everything is found and accounted for. Times: benchmarks/store_latency.py."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych_cache_store.testing import StoreProcess
from triptych_common.protocol.store import (
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    TensorSpec,
    Unpin,
    Verified,
    Verify,
)

NUM_ENTRIES = 20_000
NUM_CLIENTS = 32
SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "store_latency.py"


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


def test_the_benchmark_runs(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(BENCHMARK),
        "--entries=500",
        "--clients=4",
        "--cycles=20",
        f"--json={report}",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    costs = json.loads(report.read_text())["costs"]
    assert [(each["num_entries"], each["num_clients"]) for each in costs] == [
        (0, 1),
        (500, 1),
        (500, 4),
        (500, 4),
    ]
    assert all(each["ratio"] > 0 for each in costs)
