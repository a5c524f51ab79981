"""Two hosts of one machine, by the command line alone: joined, shown, drained. Without engines: real Redis,
stores, agents and a gateway.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import free_port, wait_until
from triptych_common.protocol.store import Pinned, PinOrWatch, Reserve, Reserved, Seal, TensorSpec
from triptych_common.region.mapping import RegionMapping
from triptych_common.store_session import StoreSession

LIMIT_S = 110.0
NO_ENGINES = ("--encoders=0", "--prefill-decodes=0", f"--region-bytes={64 << 20}")


@dataclass
class CommandLine:
    """`./triptych` of one host: its folders. Without engines."""

    run_dir: Path
    state_dir: Path

    def __call__(self, *arguments: str, code: int | None = 0) -> str:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TRIPTYCH_")},
            "TRIPTYCH_RUN_DIR": str(self.run_dir),
            "TRIPTYCH_STATE_DIR": str(self.state_dir),
            "COLUMNS": "200",
        }
        command = [sys.executable, "-m", "triptych_cli", *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", "--json", code=None))
        return found

    @property
    def join_dir(self) -> Path:
        return self.state_dir / self.run_dir.name / "join"


NUM_BYTES = 1 << 20
SPEC = TensorSpec(shape=(1, NUM_BYTES // 2), dtype="bfloat16", num_bytes=NUM_BYTES)


@pytest.fixture
def hosts(run_dir: Path) -> Iterator[tuple[CommandLine, CommandLine]]:
    """Nothing runs on them yet."""
    first, second = (CommandLine(run_dir / name, run_dir / f"state-{name}") for name in ("a", "b"))
    yield first, second
    for each in (second, first):
        each("down", code=None)


def up_first(host: CommandLine) -> str:
    return host(
        "up", "--fabric", "--host=a", *NO_ENGINES, f"--port={free_port()}", f"--fabric-port={free_port()}",
        f"--redis-port={free_port()}",
    )  # fmt: skip


def up_second(host: CommandLine, join: str) -> str:
    return host("up", f"--join={join}", "--host=b", *NO_ENGINES, f"--fabric-port={free_port()}")


def put(host: CommandLine, mm_hash: str, data: bytes) -> None:
    """As an encoder of the host would."""
    with closing(StoreSession.connect(host.run_dir / "store.sock", "tester")) as session:
        reserved = session.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
        assert isinstance(reserved, Reserved)
        mapping = RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes)
        mapping.view(reserved.offset, len(data))[:] = data
        session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
        mapping.close()


def taken(host: CommandLine, mm_hash: str) -> bytes:
    """As a prefill_decode of the host would; nothing waits."""
    with closing(StoreSession.connect(host.run_dir / "store.sock", "tester")) as session:
        pinned = session.request(PinOrWatch(seq=0, mm_hash=mm_hash))
        assert isinstance(pinned, Pinned), pinned
        mapping = RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes)
        data = bytes(mapping.view(pinned.descriptor.offset, NUM_BYTES))
        mapping.close()
    return data


def names(status: dict[str, Any]) -> set[str]:
    return {service["name"] for service in status["services"]}


def test_a_host_joins_is_shown_and_is_drained(hosts: tuple[CommandLine, CommandLine]) -> None:
    first, second = hosts
    shown = up_first(first)
    assert str(first.join_dir) in shown
    assert "requirepass" not in shown
    assert {each.name: each.stat().st_mode & 0o777 for each in first.join_dir.iterdir()} == {
        "fabric.key": 0o600,
        "redis-url": 0o600,
    }
    up_second(second, str(first.join_dir))
    assert names(first.status()) == {"redis", "store-a", "fabric-a", "gateway-a-0"}
    assert names(second.status()) == {"store-b", "fabric-b"}, "no second Redis, no gateway"

    entries = {f"{number:064x}": bytes([number]) * NUM_BYTES for number in range(1, 4)}
    for mm_hash, data in entries.items():
        put(second, mm_hash, data)
    wait_until(lambda: held(first.status(), "b") == 3, 30.0, "the agent has told what its store holds")
    refused = second("drain", "a", code=2)
    assert "drain it there" in refused
    assert "would be cut off" in first("drain", "a", code=2)

    told = second("drain", "b")
    assert "moved 3 of 3 entries" in told
    assert not second.run_dir.exists()
    for mm_hash, data in entries.items():
        assert taken(first, mm_hash) == data
    status = first.status()
    assert [host["host"] for host in status["hosts"]] == ["a"]
    assert "password" not in json.dumps(status)


def held(status: dict[str, Any], host: str) -> int | None:
    """Entries in the store of `host`, as another host sees it."""
    (found,) = [each for each in status["hosts"] if each["host"] == host]
    (store,) = found["stores"]
    number: int | None = store.get("num_entries")
    return number


def test_without_the_key_nobody_joins(hosts: tuple[CommandLine, CommandLine]) -> None:
    first, second = hosts
    up_first(first)
    url = (first.join_dir / "redis-url").read_text().strip()
    assert "copy it from the first host" in second("up", f"--join={url}", "--host=b", *NO_ENGINES, code=1)
    without_password = f"redis://{url.rpartition('@')[2]}"
    key = f"--fabric-key-file={first.join_dir / 'fabric.key'}"
    answer = second(
        "up",
        f"--join={without_password}",
        key,
        "--host=b",
        *NO_ENGINES,
        f"--fabric-port={free_port()}",
        code=1,
    )
    assert "password" in answer
    assert not second.run_dir.exists(), "what had been started was stopped again"
