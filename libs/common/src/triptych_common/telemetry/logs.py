"""Structured logs: constant text plus fields, as JSON lines or for people, on stderr.

    log = get_logger(__name__)
    log.info("job taken", job_id=job.job_id, attempt=2)

Every line also carries service, instance and, inside a span, the ids of its trace and of the span.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, LiteralString, TextIO

import orjson
from opentelemetry import trace

_FIELDS = "triptych_fields"

BURST = 20  # lines of one reason in an interval
INTERVAL_S = 60.0
MAX_REASONS = 64  # in an interval; further ones share one
OTHERS = ("others",)


class Logger:
    """Thin front of a standard logger whose methods take constant text and keyword fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, text: LiteralString, /, **fields: object) -> None:
        self._log(logging.DEBUG, text, fields)

    def info(self, text: LiteralString, /, **fields: object) -> None:
        self._log(logging.INFO, text, fields)

    def warning(self, text: LiteralString, /, **fields: object) -> None:
        self._log(logging.WARNING, text, fields)

    def error(self, text: LiteralString, /, **fields: object) -> None:
        self._log(logging.ERROR, text, fields)

    def exception(self, text: LiteralString, /, **fields: object) -> None:
        """Log an error with the traceback of the exception being handled."""
        self._log(logging.ERROR, text, fields, exc_info=True)

    def _log(self, level: int, text: str, fields: Mapping[str, object], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, text, exc_info=exc_info, extra={_FIELDS: fields}, stacklevel=3)


def get_logger(name: str) -> Logger:
    return Logger(logging.getLogger(name))


def setup_logging(
    service: str,
    instance: str,
    level: str = "INFO",
    *,
    json_lines: bool | None = None,
    stream: TextIO | None = None,
) -> None:
    """Send this process's log lines to `stream` (stderr). Replaces what an earlier call set up.

    Args:
        json_lines: None: JSON unless the stream is a terminal.

    Raises:
        ValueError: unknown `level`.
    """
    target = sys.stderr if stream is None else stream
    if json_lines is None:
        json_lines = not target.isatty()
    handler = _TriptychHandler(target)
    formatter = JsonFormatter if json_lines else HumanFormatter
    handler.setFormatter(formatter(service, instance))
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in [h for h in root.handlers if isinstance(h, _TriptychHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    # One line per request, with its path: that of media is a secret as long as they are served.
    logging.getLogger("httpx").setLevel(logging.WARNING)


class _TriptychHandler(logging.StreamHandler[TextIO]):
    """Handler class that marks the one that `setup_logging` owns."""


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance,
            "logger": record.name,
            "text": record.getMessage(),
        }
        context = trace.get_current_span().get_span_context()
        if context.is_valid:
            line["trace_id"] = f"{context.trace_id:032x}"
            line["span_id"] = f"{context.span_id:016x}"
        for key, value in _fields(record).items():
            line[f"field_{key}" if key in line else key] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


class HumanFormatter(logging.Formatter):
    """Formatter like `12:00:00.123 warning  encoder-0 job taken  job_id=j-1 attempt=2`."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._name = instance or service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = "".join(f" {key}={value}" for key, value in _fields(record).items())
        level = record.levelname.lower()
        lines = f"{clock}.{int(record.msecs):03d} {level:8} {self._name} {record.getMessage()}"
        lines += f" {fields}" if fields else ""
        if record.exc_info:
            lines += "\n" + self.formatException(record.exc_info)
        return lines


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, _FIELDS, {})
    return fields


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


class LimitedLog:
    """Log to `target` from an event loop: `BURST` lines of each reason per `INTERVAL_S`, then a count.

    A reason is the line's text with the `reason` arguments of `info`. Without the bound, requests with a
    wrong key write 10 GB a day.
    """

    def __init__(self, target: Logger) -> None:
        self._target = target
        self._counts: Counter[tuple[str, ...]] = Counter()  # lines of this interval, by reason
        self._timer: asyncio.TimerHandle | None = None

    def info(self, text: LiteralString, /, *reason: str, **fields: object) -> None:
        """Write the line, or count it if its reason has reached `BURST`."""
        key = (text, *reason)
        if key not in self._counts and len(self._counts) >= MAX_REASONS:
            key = OTHERS
        self._counts[key] += 1
        if self._counts[key] <= BURST:
            self._target.info(text, **fields)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self.end_interval)

    def end_interval(self) -> None:
        """Write the number of suppressed lines, and start again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (text, *reason), count in self._counts.items():
            if count > BURST:
                num_left_out = count - BURST
                self._target.info("log lines left out", of=text, reason=reason, num_left_out=num_left_out)
        self._counts.clear()
