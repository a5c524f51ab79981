"""Tracing of a test's process."""

from pathlib import Path
from types import SimpleNamespace

from opentelemetry.sdk.trace import TracerProvider

from triptych_common.telemetry import setup_service_tracing
from triptych_common.telemetry.exporters import OtlpProtocol
from triptych_common.telemetry.plain_spans import TailSampling
from triptych_common.telemetry.trace_files import DEFAULT_MAX_AGE_S, DEFAULT_MAX_BYTES


def setup_tracing(
    service: str,
    instance: str,
    *,
    otlp_endpoint: str | None = None,
    otlp_protocol: OtlpProtocol = "http/protobuf",
    traces_dir: Path | None = None,
    traces_max_bytes: int = DEFAULT_MAX_BYTES,
    tail_sampling: TailSampling | None = None,
) -> TracerProvider:
    """Set up tracing with these settings and the defaults of the others."""
    settings = SimpleNamespace(
        instance=instance,
        otlp_endpoint=otlp_endpoint,
        otlp_protocol=otlp_protocol,
        traces_dir=traces_dir,
        traces_max_bytes=traces_max_bytes,
        traces_max_age_s=DEFAULT_MAX_AGE_S,
    )
    return setup_service_tracing(service, settings, tail_sampling)
