"""Sockets of an HTTP server, bound before anything slow is started: a port that is taken fails at once."""

import errno
import socket

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.urls import ANY_ADDRESSES

_IPV4_ANY = "0.0.0.0"
_NOT_HERE = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


class ListenError(TriptychError):
    """The address cannot be listened on."""


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Return bound sockets that do not listen yet, so that connections are refused until then.

    `::` and the empty host are all addresses, IPv4's too; a name is every address that it stands for.

    Raises:
        ListenError: none of them can be bound here, or one is taken.
    """
    addresses = _addresses(host, port)
    bound: list[socket.socket] = []
    absent: OSError | None = None
    for family, address in addresses:
        try:
            bound.append(_bound(family, address, bound[0].getsockname()[1] if bound else port))
        except OSError as error:
            if error.errno in _NOT_HERE:  # e.g. localhost's ::1 on a machine without IPv6
                absent = error
                continue
            _close(bound)
            raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    if not bound:
        reason = "it has no address" if absent is None else absent.strerror
        raise ListenError(f"cannot listen on {host} port {port}: {reason}") from absent
    return bound


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    if host == "":
        host = "::" if socket.has_dualstack_ipv6() else _IPV4_ANY
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"cannot listen on {host} port {port}: {error.strerror}") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            is_any = address in ANY_ADDRESSES
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(not is_any))
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
