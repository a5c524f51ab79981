import io
import logging
from collections.abc import Iterator

import orjson
import pytest
from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags

from triptych_common.telemetry import within_trace
from triptych_common.telemetry.logs import get_logger, setup_logging


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_line_has_text_and_fields() -> None:
    out = io.StringIO()
    setup_logging("encoder", "encoder-0", "debug", json_lines=True, stream=out)
    get_logger("triptych.test").info("100% taken", job_id="j-1", attempt=2, text="clash")
    line = orjson.loads(out.getvalue())
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info", "service": "encoder", "instance": "encoder-0", "logger": "triptych.test",
        "text": "100% taken", "job_id": "j-1", "attempt": 2, "field_text": "clash",
    }  # fmt: skip


def test_line_inside_a_span_has_its_trace_id() -> None:
    out = io.StringIO()
    setup_logging("encoder", "encoder-0", json_lines=True, stream=out)
    context = SpanContext(trace_id=255, span_id=1, is_remote=False, trace_flags=TraceFlags(1))
    with trace.use_span(NonRecordingSpan(context)):
        get_logger("triptych.test").warning("slow")
    line = orjson.loads(out.getvalue())
    assert (line["trace_id"], line["span_id"]) == (f"{255:032x}", f"{1:016x}")


@pytest.mark.parametrize("flag", ["00", "01"])
def test_line_of_a_job_between_its_spans_has_the_id_of_its_trace(flag: str) -> None:
    """Also where the trace is not sampled: the lines of one request belong together."""
    out = io.StringIO()
    setup_logging("encoder", "encoder-0", json_lines=True, stream=out)
    with within_trace(f"00-{255:032x}-{1:016x}-{flag}"):
        get_logger("triptych.test").warning("slow")
    with within_trace(None):
        get_logger("triptych.test").warning("no job")
    first, second = map(orjson.loads, out.getvalue().splitlines())
    assert first["trace_id"] == f"{255:032x}"
    assert "trace_id" not in second


def test_exception_and_unserialisable_field() -> None:
    out = io.StringIO()
    setup_logging("encoder", "encoder-0", json_lines=True, stream=out)
    try:
        raise ValueError("no")
    except ValueError:
        get_logger("triptych.test").exception("failed", what=object)
    line = orjson.loads(out.getvalue())
    assert "ValueError: no" in line["exception"]
    assert line["what"] == "<class 'object'>"


def test_setting_up_twice_writes_once_and_level_holds() -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("a", "a-0", stream=first)
    setup_logging("a", "a-0", "WARNING", stream=second)
    get_logger("triptych.test").info("quiet")
    get_logger("triptych.test").warning("loud")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_paths_that_are_secrets_are_not_logged() -> None:
    out = io.StringIO()
    setup_logging("encoder", "encoder-0", stream=out)
    httpx_log = logging.getLogger("httpx")
    httpx_log.info("HTTP Request: GET http://gateway/internal/media/secret")
    httpx_log.warning("loud")
    assert "secret" not in out.getvalue()
    assert "loud" in out.getvalue()
