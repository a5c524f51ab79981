"""Settings of services that answer Prometheus by a listener of their own (`runtime.scrape_server`)."""

from pathlib import Path

from pydantic import BaseModel, Field

from triptych_common.protocol.urls import HostText


class MetricsSettings(BaseModel):
    """Part of such a service's settings. Where nothing is set nothing listens.

    Whoever reaches the listener may read all metrics.
    """

    metrics_socket: Path | None = Field(
        default=None, description="answer Prometheus at this Unix socket, /metrics [default: do not]"
    )
    metrics_host: HostText = Field(default="127.0.0.1", description="address of METRICS_PORT")
    metrics_port: int | None = Field(
        default=None, ge=1, le=65535, description="... at this port, /metrics [default: do not]"
    )
