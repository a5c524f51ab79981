"""What `trace` says of spans that a full disk has lost."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from triptych_cli.commands.trace import losses
from triptych_common.telemetry.span_records import LostSpans, SpanRecord

S = 1_000_000_000


@pytest.fixture
def traces_dir(tmp_path: Path) -> Path:
    """Spans were lost from second 10 to second 20."""
    lost = LostSpans(7, 10 * S, 20 * S, "encoder", "encoder-0", "No space left on device")
    (tmp_path / "encoder-1.jsonl").write_bytes(orjson.dumps(lost) + b"\n")
    return tmp_path


def span(start_s: int, end_s: int) -> SpanRecord:
    return SpanRecord("t", "s", None, "x", start_s * S, end_s * S, "ok", "gateway", "gateway-0", {})


def test_a_trace_of_that_time_may_not_be_whole(traces_dir: Path) -> None:
    (told,) = losses(traces_dir, [span(1, 11)])
    assert told.startswith("7 spans of encoder-0 are lost, from ")
    assert told.endswith(": No space left on device")


def test_a_trace_of_another_time_is(traces_dir: Path) -> None:
    assert losses(traces_dir, [span(1, 9)]) == losses(traces_dir, [span(21, 22)]) == []


def test_where_there_is_no_trace_it_may_be_among_them(traces_dir: Path) -> None:
    assert len(losses(traces_dir, [])) == 1


def test_a_disk_that_is_full_now_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    (told,) = losses(tmp_path, [span(1, 2)])
    assert "is full" in told
