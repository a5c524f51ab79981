"""Host names: one normal form for each, and lists of allowed and denied ones."""

import re
from collections.abc import Iterable
from ipaddress import AddressValueError, IPv4Address, IPv6Address, ip_address

import idna

from triptych_gateway.fetch.failures import MalformedUrlError
from triptych_gateway.fetch.rules.addresses import Address

MAX_HOST_CHARS = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # where the last label is one, resolvers read an IPv4 address
_SUFFIX = "*."


def normal_host(host: str) -> tuple[str, Address | None]:
    """Return `host` of a URL in lower-case ASCII without a final dot, and its address if it is one.

    Raises:
        MalformedUrlError: no host, or an IPv4 address in another form than four decimal numbers.
    """
    if ":" in host:
        try:
            address = IPv6Address(host)
        except AddressValueError as error:
            raise MalformedUrlError("its host is not a valid IPv6 address") from error
        if address.scope_id is not None:
            raise MalformedUrlError("an IPv6 address with a zone cannot be part of a URL")
        return str(address), address
    name = _ascii(host).removesuffix(".")
    labels = name.split(".")
    if len(name) > MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        raise MalformedUrlError("its host is not a valid name")
    if not _NUMBER.fullmatch(labels[-1]):
        return name, None
    try:
        return name, IPv4Address(name)
    except AddressValueError as error:
        raise MalformedUrlError("an IPv4 address must be written as four decimal numbers") from error


def _ascii(host: str) -> str:
    if host.isascii():
        return host.lower()
    if len(host) > MAX_HOST_CHARS:
        raise MalformedUrlError("its host is not a valid name")
    try:
        return idna.encode(host, uts46=True).decode("ascii").lower()
    except idna.IDNAError as error:
        raise MalformedUrlError("its host is not a valid name") from error


class HostRules:
    """Lists of hosts: exact, or `*.example.org` for every name below `example.org`, but not itself.

    A denied host is refused in any case; a list of allowed hosts refuses all others.
    """

    def __init__(self, allowed: Iterable[str] = (), denied: Iterable[str] = ()) -> None:
        self._allowed = frozenset(map(_normal_pattern, allowed))
        self._denied = frozenset(map(_normal_pattern, denied))

    def allows(self, host: str) -> bool:
        """Return whether the lists allow `host`, in its normal form."""
        if _is_listed(host, self._denied):
            return False
        return not self._allowed or _is_listed(host, self._allowed)


def _is_listed(host: str, patterns: frozenset[str]) -> bool:
    if host in patterns:
        return True
    labels = host.split(".")
    return any(_SUFFIX + ".".join(labels[at:]) in patterns for at in range(1, len(labels)))


def _normal_pattern(pattern: str) -> str:
    try:
        return str(ip_address(pattern))
    except ValueError:
        return pattern.lower().removesuffix(".")
