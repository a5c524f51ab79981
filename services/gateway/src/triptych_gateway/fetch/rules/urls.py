"""URLs that may be fetched, each in one normal form, so that the checked URL is the requested one.

RFC 3986's own expression splits a URL, not a library: parsers disagree about odd ones, which are refused.
"""

import re
from dataclasses import dataclass
from urllib.parse import quote, urljoin

from triptych_gateway.fetch.failures import MalformedUrlError, UrlRefusedError
from triptych_gateway.fetch.rules.addresses import Address, AddressRules
from triptych_gateway.fetch.rules.hosts import HostRules, normal_host

MAX_URL_CHARS = 8192  # signed URLs take a few thousand
DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>(?:/[^?#]*)?)(?P<rest>(?:[?#].*)?)"
)
_AUTHORITY = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<name>[^\[\]:]*))(?::(?P<port>[0-9]{1,5}))?")
CONTROL = re.compile(r"[\x00-\x20\x7f-\xa0\u2028\u2029\ud800-\udfff]")
_SAFE = "/%:@!$&'()*+,;=-._~?[]"


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
    """Rules of one gateway for URLs of media."""

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
