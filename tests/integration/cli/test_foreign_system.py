"""Commands that inspect a system, for one that `up` has not started: its addresses are in the environment,
as in the containers of Compose.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.stores import StoreProcess
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.telemetry.span_records import REQUEST_ID, SpanRecord

DIGEST = "d" * 64
REQUEST = "req-1"


def triptych(run_dir: Path, *arguments: str, **addresses: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")},
        "TRIPTYCH_RUN_DIR": str(run_dir),
        "TRIPTYCH_STATE_DIR": str(run_dir / "state"),
        "COLUMNS": "200",
        **addresses,
    }
    command = [sys.executable, "-m", "triptych_cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def record(instance: str, role: Role, *, draining: bool = False) -> InstanceRecord:
    return InstanceRecord(
        instance=instance,
        boot_id="b",
        role=role,
        url=f"http://{instance}:8100",
        model="digits-vl",
        namespace_digest=DIGEST,
        draining=draining,
    )


@pytest.mark.parametrize(
    ("instances", "exit_code"),
    [
        ([record("pd-0", Role.PREFILL_DECODE), record("encoder-0", Role.ENCODE)], 0),
        ([record("pd-0", Role.PREFILL_DECODE, draining=True), record("encoder-0", Role.ENCODE)], 1),
        ([record("encoder-0", Role.ENCODE)], 1),
    ],
    ids=["it can serve", "it drains", "no prefill_decode"],
)
async def test_status_shows_what_is_registered(
    redis_url: str, run_dir: Path, instances: list[InstanceRecord], exit_code: int
) -> None:
    async with await AsyncBus.connect(redis_url, "default", client_name="test") as bus:
        for each in instances:
            await Registry(bus).register(each, ttl_s=600.0)
        done = await asyncio.to_thread(triptych, run_dir, "status", TRIPTYCH_REDIS_URL=redis_url)
        lag = await asyncio.to_thread(triptych, run_dir, "streams", "lag", TRIPTYCH_REDIS_URL=redis_url)
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    for each in instances:
        state = "draining" if each.draining else "ready"
        assert rows[each.instance] == [each.role, state, "-", "digits-vl", DIGEST[:12], each.url], done.stdout
    assert done.returncode == exit_code, done.stderr
    assert lag.returncode == 0, lag.stderr


def test_the_store_is_found_by_its_socket(run_dir: Path) -> None:
    daemon = StoreProcess(run_dir)
    daemon.start()
    try:
        done = triptych(run_dir, "store", "stats")
        socket = str(run_dir / "store.sock")
        moved = triptych(run_dir / "elsewhere", "store", "stats", TRIPTYCH_STORE_SOCKET=socket)
    finally:
        daemon.close()
    assert "bytes free" in done.stdout, done.stderr
    assert "bytes free" in moved.stdout, moved.stderr


def test_a_trace_is_found_in_its_folder(run_dir: Path) -> None:
    folder = run_dir / "spans"
    folder.mkdir()
    nothing = triptych(run_dir, "trace", REQUEST, TRIPTYCH_TRACES_DIR=str(folder))
    assert nothing.returncode == 1
    assert str(folder) in nothing.stderr.replace("\n", "")
    span = SpanRecord(
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id=None,
        name="chat digits-vl",
        start_ns=1,
        end_ns=2_000_000,
        status="ok",
        service="gateway",
        instance="gateway-0",
        attributes={REQUEST_ID: REQUEST},
        kind="server",
    )
    (folder / "gateway-1.jsonl").write_text(json.dumps(asdict(span)) + "\n")
    found = triptych(run_dir, "trace", REQUEST, TRIPTYCH_TRACES_DIR=str(folder))
    assert found.returncode == 0, found.stderr
    assert "chat digits-vl" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code"), [(("status",), 3), (("streams", "lag"), 1), (("store", "stats"), 1)]
)
def test_without_addresses_nothing_is_running(
    run_dir: Path, arguments: tuple[str, ...], exit_code: int
) -> None:
    done = triptych(run_dir, *arguments)
    assert done.returncode == exit_code
    assert "nothing is running" in done.stdout + done.stderr
