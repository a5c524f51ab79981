"""Destination of a process's spans: an OTLP collector over HTTP or gRPC, files, or nowhere."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from opentelemetry.sdk.trace.export import SpanExporter

from triptych_common.telemetry.span_records import FileSpanExporter

OtlpProtocol = Literal["http/protobuf", "grpc"]


GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"


def is_installed(protocol: OtlpProtocol) -> bool:
    try:
        return protocol != "grpc" or find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


def span_exporter(
    service: str,
    instance: str,
    *,
    otlp_endpoint: str | None,
    otlp_protocol: OtlpProtocol,
    traces_dir: Path | None,
    max_bytes: int,
    max_age_s: int,
) -> SpanExporter | None:
    """Return the exporter to `otlp_endpoint` if given, else to files in `traces_dir` if given, else None."""
    if otlp_endpoint is not None:
        return _over_grpc(otlp_endpoint) if otlp_protocol == "grpc" else _over_http(otlp_endpoint)
    if traces_dir is not None and max_bytes:
        return FileSpanExporter(traces_dir, service, instance, max_bytes, max_age_s)
    return None


# Imported where they are needed: they pull in requests, grpc and protobuf, which most processes never use.
# What else can be set (headers, time-outs, certificates, compression) they read from OTEL_EXPORTER_OTLP_*.


def _over_http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=endpoint)
