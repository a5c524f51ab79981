"""`./triptych store …` against a real daemon, as the running system's state file names it."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration.cache_store.samples import SPEC
from tests.support.stores import StoreProcess
from triptych_cli.supervisor.state import SystemStatus, write_status
from triptych_common.protocol.store import Pinned, PinOrWatch, Reserve, Reserved, Seal
from triptych_common.region import RegionMapping
from triptych_gateway.ui.system_view import StoreReader

HASHES = [f"{n:032x}" * 2 for n in range(1, 4)]


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


# ---- what a gateway reads of the store for the page at `/ui` -------------------------------------
async def test_the_store_is_read_while_somebody_looks(daemon: StoreProcess) -> None:
    reader = StoreReader(daemon.socket, "gateway-0/ui")
    async with reader.hold():
        stats = await reader.read()
        async with reader.hold():
            again = await reader.read()
        assert stats is not None
        assert again is not None
        assert stats.region_num_bytes > 0
        assert (stats.num_sessions, again.num_sessions) == (1, 1)  # one session, however many look
        assert reader._session is not None
    assert reader._session is None


async def test_a_store_that_goes_and_comes_back(daemon: StoreProcess) -> None:
    reader = StoreReader(daemon.socket, "gateway-0/ui")
    async with asyncio.timeout(30), reader.hold():
        assert await reader.read() is not None
        daemon.stop(signal.SIGKILL)
        assert await reader.read() is None
        daemon.start()
        assert await reader.read() is not None


async def test_no_store_here(tmp_path: Path) -> None:
    reader = StoreReader(tmp_path / "store.sock", "gateway-0/ui")
    async with reader.hold():
        assert await reader.read() is None
