"""Trace files are bounded: per process, and for what ended processes left."""

import contextlib
import errno
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.util._once import Once

from tests.support.tracing import setup_tracing
from triptych_common import telemetry
from triptych_common.runtime import ServiceSettings
from triptych_common.runtime import settings as settings_module
from triptych_common.telemetry.trace_files import MAX_ENDED_FILES, TraceFile
from triptych_common.telemetry.trace_reader import read_lost, read_trace

MAX_BYTES = 40_000

WRITE = """
import sys
from pathlib import Path
from triptych_common.telemetry.trace_files import TraceFile
file = TraceFile(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
file.append(b"{}" + b" " * (int(sys.argv[4]) - 3) + b"\\n")
print("written", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _fresh_global_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER_SET_ONCE", Once())


@contextlib.contextmanager
def process(folder: Path, service: str, num_bytes: int) -> Iterator[None]:
    """A process that has written `num_bytes` and lives."""
    argv = [sys.executable, "-c", WRITE, str(folder), service, str(MAX_BYTES), str(num_bytes)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"written\n"
        yield
        child.communicate()
    assert child.returncode == 0


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_a_file_that_cannot_be_opened_again_keeps_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed one would be the next connection of the process, and the spans would go there."""
    file = TraceFile(tmp_path / "traces", "gateway", MAX_BYTES)
    shutil.rmtree(tmp_path / "traces")

    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        with pytest.raises(OSError, match="Too many"):
            file.append(b"{}\n")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        file.append(b"{}\n")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    file.close()
    assert num_bytes(tmp_path / "traces") == 3


def test_a_process_that_runs_for_ever_keeps_its_newest_spans(tmp_path: Path) -> None:
    provider = setup_tracing(
        "gateway", "g", otlp_endpoint=None, traces_dir=tmp_path, traces_max_bytes=MAX_BYTES
    )
    largest = 0
    for number in range(1000):
        with telemetry.span("gateway.request", attributes={"triptych.request_id": f"req-{number:04}"}):
            pass
        provider.force_flush()
        largest = max(largest, num_bytes(tmp_path))
    assert MAX_BYTES / 2 < largest <= MAX_BYTES
    assert {path.name.split(".", 1)[1] for path in tmp_path.iterdir()} == {"jsonl", "1.jsonl"}
    kept = [number for number in range(1000) if read_trace(tmp_path, f"req-{number:04}")]
    assert kept == list(range(kept[0], 1000))  # the newest, without a gap
    assert len(kept) > 20
    provider.shutdown()


def test_a_trace_is_read_over_both_files_and_once(tmp_path: Path) -> None:
    provider = setup_tracing(
        "gateway", "g", otlp_endpoint=None, traces_dir=tmp_path, traces_max_bytes=MAX_BYTES
    )
    with telemetry.span("gateway.request", attributes={"triptych.request_id": "req-1"}):
        traceparent = telemetry.current_traceparent()
    while not list(tmp_path.glob("*.1.jsonl")):
        with telemetry.span("gateway.media", traceparent=traceparent):
            pass
        provider.force_flush()
    spans = read_trace(tmp_path, "req-1")
    assert len(spans) == sum(path.read_bytes().count(b"\n") for path in tmp_path.iterdir())
    moved = next(tmp_path.glob("*.1.jsonl"))
    (tmp_path / "copy-1.jsonl").write_bytes(moved.read_bytes())  # as when it is moved while it is read
    assert read_trace(tmp_path, "req-1") == spans
    provider.shutdown()


def test_what_ended_processes_left_is_bounded(tmp_path: Path) -> None:
    for _ in range(6):
        with process(tmp_path, "encoder", MAX_BYTES // 3):
            pass
        assert num_bytes(tmp_path) <= 2 * MAX_BYTES
    others = tmp_path / "gateway-1.jsonl"
    others.write_bytes(b"{}\n" * MAX_BYTES)
    newest = max(tmp_path.glob("encoder-*"), key=lambda path: path.stat().st_mtime_ns)
    with process(tmp_path, "encoder", 10):
        assert len(list(tmp_path.glob("encoder-*"))) == 3 + 1
    assert newest.exists()
    assert others.exists()  # of another service: its own processes see to it


def test_many_small_files_are_bounded_in_number(tmp_path: Path) -> None:
    for number in range(MAX_ENDED_FILES + 20):
        (tmp_path / f"encoder-{900_000 + number}.jsonl").write_bytes(b"{}\n")
    TraceFile(tmp_path, "encoder", MAX_BYTES).close()
    assert len(list(tmp_path.iterdir())) == MAX_ENDED_FILES + 1


def test_files_of_living_processes_stay(tmp_path: Path) -> None:
    with process(tmp_path, "encoder", MAX_BYTES), process(tmp_path, "encoder", MAX_BYTES):
        living = set(tmp_path.iterdir())
        with process(tmp_path, "encoder", 10):
            assert len(living) == 2
            assert living < set(tmp_path.iterdir())


def test_two_containers_with_one_pid_write_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    files = [TraceFile(tmp_path, "encoder", MAX_BYTES) for _ in range(3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "encoder-1-2.jsonl",
        "encoder-1-3.jsonl",
        "encoder-1.jsonl",
    ]
    for file in files:
        file.close()
    TraceFile(tmp_path, "encoder", MAX_BYTES).close()  # after a restart: the first one again
    assert len(list(tmp_path.iterdir())) == 3


def test_no_files_at_all(tmp_path: Path) -> None:
    provider = setup_tracing("gateway", "g", otlp_endpoint=None, traces_dir=tmp_path, traces_max_bytes=0)
    with telemetry.span("gateway.request"):
        pass
    provider.shutdown()
    assert not list(tmp_path.iterdir())


def test_a_service_started_by_hand_writes_them_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `./triptych trace` looks, and not into memory; one with a run directory of its own, there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(settings_module, "default_run_dir", lambda: Path("/dev/shm/triptych-0"))
    for name in ("TRIPTYCH_RUN_DIR", "TRIPTYCH_TRACES_DIR"):
        monkeypatch.delenv(name, raising=False)
    by_hand = ServiceSettings(run_dir=Path("/dev/shm/triptych-0"))
    assert by_hand.traces_dir == tmp_path / ".local/state/triptych/triptych-0/traces"
    assert ServiceSettings(run_dir=tmp_path).traces_dir == tmp_path / "traces"


HOUR = 3600
LINE = b'{"end_ns":%d}\n'


def aged(path: Path, hours: float, now: float) -> Path:
    path.write_bytes(LINE % int((now - hours * HOUR) * 1e9))
    os.utime(path, (now - hours * HOUR, now - hours * HOUR))
    return path


def test_old_spans_go_and_younger_ones_stay(tmp_path: Path) -> None:
    now = 1e9
    old, young = (
        aged(tmp_path / "gateway-900001.jsonl", 25, now),
        aged(tmp_path / "gateway-900002.jsonl", 23, now),
    )
    others = aged(tmp_path / "encoder-900003.jsonl", 99, now)
    file = TraceFile(tmp_path, "gateway", MAX_BYTES, max_age_s=24 * HOUR, now=lambda: now)
    assert (old.exists(), young.exists(), others.exists()) == (False, True, True)
    file.close()
    TraceFile(tmp_path, "gateway", MAX_BYTES, max_age_s=0, now=lambda: now * 2).close()
    assert young.exists(), "0: however old"


def test_a_process_that_runs_for_ever_drops_its_old_spans(tmp_path: Path) -> None:
    clock = [1e9]
    file = TraceFile(tmp_path, "gateway", MAX_BYTES, max_age_s=24 * HOUR, now=lambda: clock[0])

    def write() -> list[float]:
        """Ages in hours of what is there afterwards."""
        file.append(LINE % int(clock[0] * 1e9))
        for path in tmp_path.iterdir():
            newest = max(json.loads(line)["end_ns"] for line in path.read_bytes().splitlines()) / 1e9
            os.utime(path, (newest, newest))  # as if the clock of the file system were ours
        lines = [line for path in tmp_path.iterdir() for line in path.read_bytes().splitlines()]
        return sorted((clock[0] - json.loads(line)["end_ns"] / 1e9) / HOUR for line in lines)

    for _ in range(100):
        ages = write()
        assert ages[-1] <= 24
        assert ages == [float(hour) for hour in range(len(ages))], "without a gap"
        clock[0] += HOUR
    assert len(ages) > 12
    clock[0] += 30 * HOUR  # nothing came for long
    assert write() == [0.0]
    file.close()


def test_a_file_from_before_a_restart_is_as_old_as_its_first_span(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container every process has the same pid."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    now = 1e9
    path = aged(tmp_path / "gateway-1.jsonl", 13, now)
    file = TraceFile(tmp_path, "gateway", MAX_BYTES, max_age_s=24 * HOUR, now=lambda: now)
    file.append(LINE % int(now * 1e9))
    file.close()
    assert path.read_bytes().count(b"\n") == 1
    assert (tmp_path / "gateway-1.1.jsonl").exists()


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """A file cannot grow beyond `num_bytes`: what fits is written, as on a disk that gets full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_a_full_disk_has_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, "gateway", MAX_BYTES)
    file.append(b'{"n":1}\n')
    with full_disk(12), pytest.raises(OSError, match="too large"):
        file.append(b'{"n":2}\n')
    file.append(b'{"n":3}\n')
    file.close()
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == b'{"n":1}\n{"n"\n{"n":3}\n'


def test_a_line_that_a_killed_process_has_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    """A later process with the same pid takes its file up."""
    (tmp_path / f"gateway-{os.getpid()}.jsonl").write_bytes(b'{"n":1}\n{"n"')
    file = TraceFile(tmp_path, "gateway", MAX_BYTES, max_age_s=0)
    file.append(b'{"n":3}\n')
    file.close()
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == b'{"n":1}\n{"n"\n{"n":3}\n'


def test_spans_that_a_full_disk_has_lost_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    provider = setup_tracing("gateway", "gateway-0", otlp_endpoint=None, traces_dir=tmp_path)

    def serve(request_id: str) -> None:
        with telemetry.span("gateway.request", attributes={"triptych.request_id": request_id}):
            pass
        provider.force_flush()

    serve("before")
    with full_disk(num_bytes(tmp_path) + 40):
        serve("lost-1")
        serve("lost-2")
    assert read_lost(tmp_path) == [], "there was no space for it"
    serve("after")
    provider.shutdown()
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert texts == ["spans not written, they are lost"], "once"
    (lost,) = read_lost(tmp_path)
    assert (lost.num_lost, lost.instance) == (2, "gateway-0")
    assert "too large" in lost.error
    (before,), (after,) = read_trace(tmp_path, "before"), read_trace(tmp_path, "after")
    assert before.end_ns <= lost.start_ns <= lost.end_ns <= after.start_ns
    assert not read_trace(tmp_path, "lost-1") + read_trace(tmp_path, "lost-2")
