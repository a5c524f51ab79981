"""Traces, logs and metrics."""

from triptych_common.telemetry.logs import get_logger, setup_logging
from triptych_common.telemetry.tracing import (
    context_from,
    current_traceparent,
    record_span,
    setup_tracing,
    span,
    traceparent_of,
    tracer,
)

__all__ = [
    "context_from",
    "current_traceparent",
    "get_logger",
    "record_span",
    "setup_logging",
    "setup_tracing",
    "span",
    "traceparent_of",
    "tracer",
]
