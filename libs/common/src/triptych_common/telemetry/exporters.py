"""Destination of a process's spans: an OTLP collector over HTTP or gRPC, files, or nowhere."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from opentelemetry.sdk.trace.export import SpanExporter

from triptych_common.telemetry.span_records import FileSpanExporter

OtlpProtocol = Literal["http/protobuf", "grpc"]


GRPC_PACKAGE = "opentelemetry-exporter-otlp-proto-grpc"


def is_installed(protocol: OtlpProtocol) -> bool:
    try:
        return protocol != "grpc" or find_spec("opentelemetry.exporter.otlp.proto.grpc") is not None
    except ModuleNotFoundError:
        return False


class TracingSettings(Protocol):
    """Trace settings of a process: `ServiceSettings`, and the options of the connector."""

    @property
    def instance(self) -> str: ...
    @property
    def otlp_endpoint(self) -> str | None: ...  # base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT
    @property
    def otlp_protocol(self) -> OtlpProtocol: ...
    @property
    def traces_dir(self) -> Path | None: ...
    @property
    def traces_max_bytes(self) -> int: ...  # 0: nothing is kept
    @property
    def traces_max_age_s(self) -> int: ...


def span_exporter(service: str, settings: TracingSettings) -> SpanExporter | None:
    """Return the exporter to `otlp_endpoint` if set, else to files in `traces_dir` if set, else None."""
    if (endpoint := settings.otlp_endpoint) is not None:
        return _over_grpc(endpoint) if settings.otlp_protocol == "grpc" else _over_http(endpoint)
    if settings.traces_dir is not None and settings.traces_max_bytes:
        bounds = settings.traces_max_bytes, settings.traces_max_age_s
        return FileSpanExporter(settings.traces_dir, service, settings.instance, *bounds)
    return None


# Imported where they are needed: they pull in requests, grpc and protobuf, which most processes never use.
# What else can be set (headers, time-outs, certificates, compression) they read from OTEL_EXPORTER_OTLP_*.


def _over_http(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")


def _over_grpc(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

    return OTLPSpanExporter(endpoint=endpoint)
