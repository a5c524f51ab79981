"""Settings of services that serve metrics on a listener of their own (`runtime.scrape_server`)."""

from pathlib import Path

from pydantic import BaseModel, Field
from pydantic_settings import SettingsConfigDict

from triptych_common.protocol.urls import HostText


class MetricsSettings(BaseModel):
    """Mixin for a service's settings: it listens for Prometheus only where a socket or a port is set.

    Any client that reaches the listener may read all metrics.
    """

    model_config = SettingsConfigDict(use_attribute_docstrings=True)

    metrics_socket: Path | None = None
    """Unix socket, made with mode 0600, that serves metrics at `/metrics`. Not set: none."""
    metrics_host: HostText = "127.0.0.1"
    """Address that `metrics_port` listens on; any client that reaches it may read all metrics."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port that serves metrics at `/metrics`. Not set: none."""
