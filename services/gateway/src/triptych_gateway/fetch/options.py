"""Options of fetching; the settings are in `GatewaySettings`, as `fetch_…`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from triptych_gateway.fetch.rules.addresses import Network
from triptych_gateway.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Rules and bounds of fetching, with the settings' defaults."""

    max_item_bytes: int
    fetches_urls: bool = True
    allowed_ports: Sequence[int] = (80, 443)
    allowed_hosts: Sequence[str] = ()
    denied_hosts: Sequence[str] = ()
    allowed_networks: Sequence[Network] = ()
    max_redirects: int = 3
    timeout_s: float = 15.0  # for all attempts together
    connect_timeout_s: float = 3.0
    chunk_timeout_s: float = 5.0
    max_header_bytes: int = 16 << 10
    max_attempts: int = 3
    max_in_flight: int = 64
    max_per_host: int = 8
    cache_bytes: int = 64 << 20
    ca_file: Path | None = None
    proxy: str | None = None
    file_root: Path | None = None

    @classmethod
    def of(cls, settings: GatewaySettings) -> Self:
        """Take the options from the settings."""
        proxy = settings.fetch_proxy
        return cls(
            max_item_bytes=settings.max_item_bytes,
            fetches_urls=settings.fetch_urls,
            allowed_ports=settings.fetch_allowed_ports,
            allowed_hosts=settings.fetch_allowed_hosts,
            denied_hosts=settings.fetch_denied_hosts,
            allowed_networks=settings.fetch_allowed_networks,
            max_redirects=settings.fetch_max_redirects,
            timeout_s=settings.fetch_timeout_s,
            connect_timeout_s=settings.fetch_connect_timeout_s,
            chunk_timeout_s=settings.fetch_chunk_timeout_s,
            max_header_bytes=settings.fetch_max_header_bytes,
            max_attempts=settings.fetch_max_attempts,
            max_in_flight=settings.fetch_max_in_flight,
            max_per_host=settings.fetch_max_per_host,
            cache_bytes=settings.fetch_cache_bytes,
            ca_file=settings.fetch_ca_file,
            proxy=None if proxy is None else proxy.get_secret_value(),
            file_root=settings.fetch_file_root,
        )
