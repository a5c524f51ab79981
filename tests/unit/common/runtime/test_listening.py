"""Where a service listens: real sockets."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from triptych_common.protocol.urls import local_urls
from triptych_common.runtime import ListenError, bind_tcp

has_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@contextlib.contextmanager
def listening(host: str, port: int = 0) -> Iterator[int]:
    sockets = bind_tcp(host, port)
    try:
        for sock in sockets:
            sock.listen()
        yield sockets[0].getsockname()[1]
    finally:
        for sock in sockets:
            sock.close()


def answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "on_ipv4", "on_ipv6"),
    [
        ("127.0.0.1", True, False),
        ("0.0.0.0", True, False),
        pytest.param("::1", False, True, marks=has_ipv6),
        pytest.param("::", True, True, marks=has_ipv6),
        pytest.param("", True, True, marks=has_ipv6),
    ],
)
def test_which_addresses_are_listened_on(host: str, on_ipv4: bool, on_ipv6: bool) -> None:
    with listening(host) as port:
        assert (answers("127.0.0.1", port), answers("::1", port)) == (on_ipv4, on_ipv6)
        assert any(f"{port}" in url for url in local_urls(host, port))


def test_a_name_is_all_of_its_addresses() -> None:
    found = {info[4][0] for info in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    with listening("localhost") as port:
        assert any(answers(str(address), port) for address in found)


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=has_ipv6), "localhost"])
def test_a_port_that_is_taken_is_an_error(host: str) -> None:
    with (
        listening(host) as port,
        pytest.raises(ListenError, match=f"{host} port {port}: Address already in use"),
    ):
        bind_tcp(host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_an_error(host: str) -> None:
    with pytest.raises(ListenError, match=host):
        bind_tcp(host, 0)
