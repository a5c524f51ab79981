"""Rules for URLs that media may be fetched from: scheme, port, host and address.

Everything in IANA's registries of special addresses is refused, with what clouds serve their machines from
public space. An IPv6 address that carries an IPv4 address counts as that one (mapped, NAT64), or is refused
where it could lead anywhere (6to4, Teredo, ISATAP, NAT64 of a local prefix, IPv4-compatible).

RFC 3986's own expression splits a URL, not a library: parsers disagree about odd ones, which are refused.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from urllib.parse import quote, urljoin

import idna

from triptych_gateway.fetch.failures import MalformedUrlError, UrlRefusedError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_REFUSED_V4 = tuple(
    IPv4Network(each)
    for each in (
        "0.0.0.0/8",  # this network; 0.0.0.0 reaches this host
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carriers' NAT; metadata of Alibaba Cloud
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # Azure's own services, for its machines alone
        "169.254.0.0/16",  # link-local; metadata of most clouds
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments; metadata of Oracle's cloud
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved; broadcast
    )
)
_GLOBAL_V6 = IPv6Network("2000::/3")  # all that IANA has given out for global unicast
_REFUSED_V6 = tuple(
    IPv6Network(each)
    for each in (
        "2001::/23",  # protocol assignments: Teredo, benchmarks, ORCHID
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4
        "3fff::/20",  # documentation
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})  # the upper half of an interface's identifier
MAX_HOST_CHARS = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # where the last label is one, resolvers read an IPv4 address
_SUFFIX = "*."
MAX_URL_CHARS = 8192  # signed URLs take a few thousand
DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>(?:/[^?#]*)?)(?P<rest>(?:[?#].*)?)"
)
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::(?P<port>[0-9]{1,5}))?")
CONTROL = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]")
_SAFE = "/%:@!$&'()*+,;=-._~?[]"


@dataclass(frozen=True, slots=True)
class AddressRules:
    """Address rules of one gateway; the networks in `allowed` are exempt from all others."""

    allowed: Sequence[Network] = ()

    def allows(self, address: Address) -> bool:
        meant = meant_address(address)
        if any(address in network or meant in network for network in self.allowed):
            return True
        if isinstance(meant, IPv4Address):
            is_refused = any(meant in network for network in _REFUSED_V4)
        else:
            is_refused = meant not in _GLOBAL_V6 or any(meant in network for network in _REFUSED_V6)
            is_refused |= (int(meant) >> 32) & 0xFFFF_FFFF in _ISATAP
        # The standard library's opinion counts too: the tables are not of the same age.
        return not is_refused and meant.is_global and not meant.is_multicast

    def allows_text(self, text: str) -> bool:
        """Return the same for a socket's address text, perhaps with a zone. Other text is refused."""
        try:
            return self.allows(ip_address(text.partition("%")[0]))
        except ValueError:
            return False


def meant_address(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address carries; else the address itself."""
    if isinstance(address, IPv6Address) and (address in _MAPPED or address in _NAT64):
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address


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


@dataclass(frozen=True, slots=True, repr=False)
class FetchUrl:
    """URL that the rules allow. Its `repr` has no path, which may be as good as a password."""

    scheme: str
    host: str  # without brackets
    port: int
    target: str  # path and query, percent-encoded
    address: Address | None  # where the host is one

    @property
    def text(self) -> str:
        """Text of the URL; equivalent URLs (RFC 3986's first rules) have the same text."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.target}"

    def __repr__(self) -> str:
        return f"FetchUrl({self.scheme}, {self.host}, {self.port})"


@dataclass(frozen=True, slots=True)
class UrlRules:
    ports: frozenset[int]
    hosts: HostRules
    addresses: AddressRules

    def check(self, text: str) -> FetchUrl:
        """Return `text` in its normal form.

        Raises:
            MalformedUrlError: it is none that could be fetched.
            UrlRefusedError: it is not allowed.
        """
        url = parse_url(text)
        if url.port not in self.ports:
            raise UrlRefusedError("its port is not allowed")
        if not self.hosts.allows(url.host):
            raise UrlRefusedError("its host is not allowed")
        if url.address is not None and not self.addresses.allows(url.address):
            raise address_refused()
        return url

    def check_redirect(self, origin: FetchUrl, location: str) -> FetchUrl:
        """Return the URL of a redirect of `origin`, checked like any other URL.

        Raises:
            UrlRefusedError: it is not allowed, or cannot be fetched, or leads from https to http.
        """
        try:
            if len(location) > MAX_URL_CHARS or CONTROL.search(location):
                raise MalformedUrlError("it is malformed")
            target = self.check(urljoin(origin.text, location))
        except (MalformedUrlError, UrlRefusedError, ValueError) as error:
            reason = getattr(error, "reason", "it is malformed")
            raise UrlRefusedError(f"a redirect is refused: {reason}") from error
        if origin.scheme == "https" and target.scheme != "https":
            raise UrlRefusedError("a redirect leads from https to http")
        return target


def address_refused() -> UrlRefusedError:
    """Return one error for literal addresses and names: the caller learns no address."""
    return UrlRefusedError("it leads to an address that is not allowed")


def parse_url(text: str) -> FetchUrl:
    """Split `text` and normalize each part; the fragment is dropped.

    Raises:
        MalformedUrlError: it is none that could be fetched.
        UrlRefusedError: another scheme, or credentials.
    """
    if len(text) > MAX_URL_CHARS:
        raise MalformedUrlError(f"a URL may have {MAX_URL_CHARS} characters")
    if CONTROL.search(text):
        raise MalformedUrlError("it holds spaces or control characters; they must be percent-encoded")
    parts = _URL.fullmatch(text)
    if parts is None:
        raise MalformedUrlError("it is not a URL with a scheme and a host")
    scheme = parts["scheme"].lower()
    if scheme not in DEFAULT_PORTS:
        raise UrlRefusedError("only http and https URLs are fetched")
    if "@" in parts["authority"]:
        raise UrlRefusedError("a URL may not hold credentials")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None or not (authority["v6"] or authority["name"]):
        raise MalformedUrlError("its host and port are ambiguous")
    if authority["v6"] is not None and ":" not in authority["v6"]:
        raise MalformedUrlError("its host is not a valid IPv6 address")
    host, address = normal_host(authority["v6"] or authority["name"])
    port = DEFAULT_PORTS[scheme] if authority["port"] is None else int(authority["port"])
    if not 0 < port < 1 << 16:
        raise MalformedUrlError("its port is not valid")
    query = parts["rest"].partition("#")[0]
    target = quote((parts["path"] or "/") + query, safe=_SAFE)
    return FetchUrl(scheme, host, port, target, address)
