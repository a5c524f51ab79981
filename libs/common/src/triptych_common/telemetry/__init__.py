"""Traces, logs and metrics of a process.

tracing       spans: opened, recorded, continued from a message
plain_spans   spans that cost little
exporters     destinations: OTLP over HTTP or gRPC, files
span_records  a span as a JSON line, and the exporter that writes it
trace_files   the files of these lines: names, locks, how much of the disk they take
trace_reader  reads one request's trace back from them
waterfall     draws it as text
logs          constant text with fields, as JSON or for a terminal
metrics       Prometheus' registry of one service
"""

from triptych_common.telemetry.logs import get_logger, setup_logging
from triptych_common.telemetry.tracing import (
    context_from,
    context_of_headers,
    current_traceparent,
    record_span,
    setup_service_tracing,
    span,
    trace_headers,
    traceparent_of,
    tracer,
    within_trace,
)

__all__ = [
    "context_from",
    "context_of_headers",
    "current_traceparent",
    "get_logger",
    "record_span",
    "setup_logging",
    "setup_service_tracing",
    "span",
    "trace_headers",
    "traceparent_of",
    "tracer",
    "within_trace",
]
