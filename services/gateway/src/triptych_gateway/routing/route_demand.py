"""RouteDemand: routing rules of one request. Pure; `chat.routing_headers` reads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.router import ServingStage

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class RouteDemand:
    """Routing rules of one request, empty for most."""

    find_session: Callable[[], bytes] = bytes  # called where there is a choice alone
    version: str | None = None  # None: any
    hosts: Mapping[ServingStage, frozenset[str]] = field(default_factory=dict)
    """Addresses `host:port` of instances for a stage, `prefill` or `decode`; both bound a whole request."""

    def allows(self, record: InstanceRecord, stage: ServingStage) -> bool:
        """Return whether `record` may take `stage`."""
        limits = (hosts for of, hosts in self.hosts.items() if stage in (of, ServingStage.WHOLE))
        return all(host_of(record) in hosts for hosts in limits)


ANYWHERE = RouteDemand()


def host_of(record: InstanceRecord) -> str | None:
    """Return `host:port` of the URL that an instance announces, or None."""
    if record.url is None:
        return None
    parts = urlsplit(record.url)
    return join_host(parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme, 0))


def join_host(host: str, port: int) -> str:
    """Return `host:port` normalized for comparison: lower case, IPv6 in brackets."""
    return f"[{host.lower()}]:{port}" if ":" in host else f"{host.lower()}:{port}"
