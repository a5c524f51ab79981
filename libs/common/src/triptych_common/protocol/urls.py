"""Base URLs of instances, built and checked in one place.

An IPv6 address stands in brackets there (RFC 3986); as the address of a socket it has none.
"""

import ipaddress
import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

ANY_ADDRESSES = ("0.0.0.0", "::", "")
"""Addresses that mean all addresses to a server; none of them can be called."""

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_MAX_HOST_CHARS = 253
_MAX_URL_CHARS = 2048
_TEXT = re.compile(rf"[!-~]{{1,{_MAX_URL_CHARS}}}")
_PATH = re.compile(r"(/[A-Za-z0-9._~%!$&'()*+,;=:@-]*)*")


def check_host(host: str) -> str:
    """Return `host` as sockets take it: a name, an IPv4 address, or an IPv6 address without brackets.

    Raises:
        ValueError: it is none of them. An address with a zone (`fe80::1%eth0`) has no place in a URL.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or bare != host:
        address = ipaddress.IPv6Address(bare)
        if address.scope_id is not None:
            raise ValueError("an IPv6 address with a zone cannot be part of a URL")
        return bare
    labels = bare.removesuffix(".").split(".")
    if bare and (len(bare) > _MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels))):
        raise ValueError("must be a host name or an IP address")
    if any(label.lower().startswith("xn--") for label in labels):
        bare.encode("ascii").decode("idna")  # UnicodeError, a ValueError, where nothing is encoded
    return bare


def base_url(host: str, port: int) -> str:
    """Return `http://host:port` for a host that can be called.

    Raises:
        ValueError: `host` is not one, or stands for all addresses.
    """
    bare = check_host(host)
    if bare in ANY_ADDRESSES:
        raise ValueError(f"{host!r} stands for all addresses; it cannot be called")
    return f"http://[{bare}]:{port}" if ":" in bare else f"http://{bare}:{port}"


def local_urls(host: str, port: int) -> tuple[str, ...]:
    """Return the URLs at which this machine reaches a server on `host`; one answer is enough.

    "All addresses" means IPv6, IPv4 or both, depending on the system.
    """
    if host == "0.0.0.0":
        return (base_url("127.0.0.1", port),)
    if host in ANY_ADDRESSES:
        return base_url("::1", port), base_url("127.0.0.1", port)
    return (base_url(host, port),)


def check_base_url(url: str) -> str:
    """Return `url` unchanged if an HTTP client can call it. Raises ValueError: it cannot."""
    if not _TEXT.fullmatch(url):
        raise ValueError(f"must be 1 to {_MAX_URL_CHARS} ASCII characters without spaces")
    parts = urlsplit(url)  # ValueError: brackets that do not match
    host, port = parts.hostname, parts.port  # ValueError: no number, or beyond 65535
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("must be http://host:port or https://host:port")
    if parts.username is not None or parts.query or parts.fragment or not _PATH.fullmatch(parts.path):
        raise ValueError("must be a base URL: scheme, host, port and path, nothing else")
    bare = check_host(host)
    netloc = f"[{bare}]" if ":" in bare else bare
    if parts.netloc.lower() not in (netloc, f"{netloc}:{port}"):
        raise ValueError("the host and port cannot be read without doubt")
    return url


HostText = Annotated[str, AfterValidator(check_host)]
BaseUrlText = Annotated[str, AfterValidator(check_base_url)]
