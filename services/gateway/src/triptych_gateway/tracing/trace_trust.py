"""Trust in callers' `traceparent`. Others are ignored, since a trusted caller decides what is recorded."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from opentelemetry.context import Context
from starlette.types import Scope

from triptych_common.telemetry import context_of_headers

_HEADERS = frozenset({b"traceparent", b"tracestate"})


def address_of(scope: Scope) -> IPv4Address | IPv6Address | None:
    """Return the caller's address: the connection's, or a trusted proxy's word; or None."""
    client = scope.get("client")
    return _parsed(client[0]) if client else None


def comes_from(scope: Scope, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    """Return whether the caller's address is known, and in one of `networks`."""
    address = address_of(scope)
    return address is not None and any(address in network for network in networks)


@lru_cache(maxsize=1024)  # callers have many requests each
def _parsed(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


@dataclass(frozen=True, slots=True)
class TraceTrust:
    """Trust in no peer, in every peer, or in peers of some networks."""

    is_on: bool = False
    networks: tuple[IPv4Network | IPv6Network, ...] = ()  # none: of all peers

    def context_of(self, scope: Scope) -> Context:
        """Return the caller's context; an empty one without one, or from an untrusted peer."""
        if not self.is_on or (self.networks and not comes_from(scope, self.networks)):
            return Context()
        headers: dict[str, list[str]] = defaultdict(list)
        for name, value in scope["headers"]:
            if name in _HEADERS:
                headers[name.decode()].append(value.decode("latin-1"))
        return context_of_headers(headers)
