"""`./triptych store …` against a real daemon, as the running system's state file names it."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.stores import StoreProcess
from triptych_cli.supervisor.state import SystemStatus, write_status
from triptych_common.protocol.store import Pinned, PinOrWatch, Reserve, Reserved, Seal, TensorSpec
from triptych_common.region import RegionMapping

HASHES = [f"{n:032x}" * 2 for n in range(1, 4)]
SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)


def store(run_dir: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRIPTYCH_RUN_DIR": str(run_dir), "COLUMNS": "200"}
    command = [sys.executable, "-m", "triptych_cli", "store", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_what_an_operator_sees_and_does(daemon: StoreProcess, run_dir: Path) -> None:
    status = SystemStatus(
        supervisor_pid=os.getpid(),
        endpoint="",
        redis_url="",
        deployment="default",
        store_socket=str(daemon.socket),
        traces_dir="",
        model="",
        services=(),
    )
    write_status(run_dir / "supervisor.json", status)
    session = daemon.connect("engine")
    for mm_hash in HASHES:
        reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
        assert isinstance(reserved, Reserved)
        session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
    pinned = session.request(PinOrWatch(seq=0, mm_hash=HASHES[0]))
    assert isinstance(pinned, Pinned)

    listed = store(run_dir, "ls")
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[1] for line in listed.stdout.splitlines()[1:]] == ["pinned", "ready", "ready"]
    lines = dict(line.rsplit(maxsplit=1) for line in store(run_dir, "stats").stdout.splitlines())
    assert lines["entries"] == "3"
    assert lines["hits"] == "1"
    assert lines["seal to pin"] == "1"
    verified = store(run_dir, "verify")
    assert verified.returncode == 0
    assert "0 intact, 3 checksums taken now, 0 evicted meanwhile, 0 damaged; 192 B" in verified.stdout

    welcome = session.welcome
    mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes, populate=False)
    mapping.view(pinned.descriptor.offset, 1)[0] ^= 1
    verified = store(run_dir, "verify")
    assert verified.returncode == 1
    assert f"damaged: {HASHES[0]} (checksum, held by 1 pins)" in verified.stdout
    assert store(run_dir, "evict", HASHES[1][:40]).returncode == 0
    assert daemon.stats().num_entries == 2
