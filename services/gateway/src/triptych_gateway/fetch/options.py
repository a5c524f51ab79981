"""What an operator can set about fetching; the settings are in `GatewaySettings`, as `fetch_…`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych_gateway.fetch.rules.addresses import Network


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Rules and bounds; defaults are those of the settings."""

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
