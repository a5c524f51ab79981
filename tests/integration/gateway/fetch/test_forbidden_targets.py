"""No URL, no redirect and no name leads to an address that is not allowed.

The listener on 127.0.0.1 stands for all that is private; 127.0.0.2 stands for the Internet.
"""

import asyncio
import socket
from ipaddress import ip_address, ip_network

import pytest
from aiohttp import ClientConnectorError

from tests.support.gateway.fetching import QUICK, ChosenNames, TurningNames, code_of, fetch, fetching, refusal
from tests.support.gateway.media_server import FORBIDDEN, SERVED, MediaServer, answering, redirecting
from tests.support.gateway.samples import image_bytes
from tests.unit.gateway.fetch.test_addresses import REFUSED as NOT_PUBLIC
from triptych_common.domain.errors import RequestError
from triptych_gateway.fetch.client import AddressRefusedError, checked_socket, failure_of, open_client
from triptych_gateway.fetch.fetch_rules import AddressRules

REFUSED = [each for each in NOT_PUBLIC if each != SERVED]
NOT_ALLOWED = {(400, "url_not_allowed"), (400, "invalid_image_url")}
LOOPBACK_HOSTS = [
    "127.0.0.1", "127.0.0.1.", "127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.0.0.1", "0177.0.0.1",
    "017700000001", "127.0.0.01", "0", "0.0.0.0", "127.0.0.0x1", "0x7F.1", "127.0.0.1:80@127.0.0.1",
    "[::1]", "[::]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]", "[::127.0.0.1]",
    "[64:ff9b::127.0.0.1]", "[64:ff9b:1::7f00:1]", "[2002:7f00:1::]", "[2a00::5efe:127.0.0.1]",
    "[::1%25lo]", "[fe80::1%25lo]", "１２７.０.０.１", "127。0。0。1", "①②⑦.⓪.⓪.①", "%31%32%37.0.0.1",
    "127.0.0.1%00.example.org", "example.org@127.0.0.1", "127.0.0.1\\@example.org",
    "127.0.0.1%2523@example.org", "[::ffff:0:127.0.0.1]",
]  # fmt: skip


def literal(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("host", [*LOOPBACK_HOSTS, *map(literal, REFUSED)])
async def test_by_its_url_and_by_redirects(server: MediaServer, forbidden: MediaServer, host: str) -> None:
    target = f"http://{host}:{forbidden.port}/"
    async with fetching() as fetcher:
        assert code_of(await refusal(fetcher, target)) in NOT_ALLOWED
        server.answers["/one"] = redirecting(target)
        server.answers["/two"] = redirecting("/one", 307)
        for path in ("/one", "/two"):
            assert code_of(await refusal(fetcher, server.url(path))) == (400, "url_not_allowed"), path


@pytest.mark.parametrize("address", REFUSED)
async def test_by_its_name(server: MediaServer, forbidden: MediaServer, address: str) -> None:
    names = ChosenNames(evil_test=[[address]], both_test=[[SERVED, address], [address, SERVED]])
    async with fetching(names) as fetcher:
        for host in ("evil.test", "both.test", "both.test"):
            assert code_of(await refusal(fetcher, forbidden.url(host=host))) == (400, "url_not_allowed")
        for host in ("evil.test", "both.test"):
            error = await refusal(fetcher, server.leading_to(forbidden.url(host=host)))
            assert code_of(error) == (400, "url_not_allowed")


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "localhost."])
async def test_names_of_this_machine(forbidden: MediaServer, name: str) -> None:
    async with open_client(QUICK) as client:
        with pytest.raises(ClientConnectorError) as caught:
            await client.get(f"http://{name}:{forbidden.port}/")
    # With the dot it is looked up elsewhere, and may not be known.
    assert failure_of(caught.value).outcome == "refused" or name.endswith(".")


async def test_a_name_that_changes_between_requests(server: MediaServer, forbidden: MediaServer) -> None:
    """Each connection looks it up, and checks it, anew: also the one for a redirect to the same host."""
    server.answers["/same"] = redirecting("/a.png")
    names = ChosenNames(turning_test=[[SERVED], [FORBIDDEN], [SERVED], [FORBIDDEN]])
    url = server.url(host="turning.test")
    async with fetching(names) as fetcher:
        assert await fetch(fetcher, url + "a.png") == image_bytes(7)
        assert code_of(await refusal(fetcher, url + "a.png")) == (400, "url_not_allowed")
        assert code_of(await refusal(fetcher, url + "same")) == (400, "url_not_allowed")
    assert names.num_lookups == 4
    assert [asked.target for asked in server.asked] == ["/a.png", "/same"]


async def test_a_name_that_changes_between_check_and_connection(
    server: MediaServer, forbidden: MediaServer
) -> None:
    """No resolver does that. The socket would not be made all the same."""
    url = forbidden.url(host="turning.test")
    names = TurningNames(checked=SERVED, connected=FORBIDDEN)
    async with fetching(names, fetch_max_attempts=1) as fetcher:
        for num_lookups, asked in enumerate((url, server.leading_to(url)), 1):
            assert code_of(await refusal(fetcher, asked)) == (400, "url_not_allowed")
            assert names.num_lookups == num_lookups


@pytest.mark.parametrize("address", REFUSED)
def test_no_socket_is_made(address: str) -> None:
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with pytest.raises(AddressRefusedError):
        checked_socket(AddressRules(), (family, socket.SOCK_STREAM, 0, "", (address, 80)))


@pytest.mark.parametrize("port", [22, 25, 6379, 8080])
async def test_ports(server: MediaServer, forbidden: MediaServer, port: int) -> None:
    async with fetching(fetch_allowed_ports=(80, 443, server.port)) as fetcher:
        assert code_of(await refusal(fetcher, f"http://{SERVED}:{port}/")) == (400, "url_not_allowed")
        error = await refusal(fetcher, server.leading_to(f"http://{SERVED}:{port}/"))
        assert code_of(error) == (400, "url_not_allowed")


async def test_host_lists_count_for_redirects_too(server: MediaServer) -> None:
    names = ChosenNames(good_test=[[SERVED]], bad_test=[[SERVED]])
    server.answers["/one"] = redirecting(server.url("/a.png", host="bad.test"))
    for lists in ({"fetch_allowed_hosts": ("good.test",)}, {"fetch_denied_hosts": ("*.test", "bad.test")}):
        async with fetching(names, **lists) as fetcher:
            error = await refusal(fetcher, server.url("/one", host="good.test"))
            assert code_of(error) == (400, "url_not_allowed"), lists


async def test_redirects_end(server: MediaServer) -> None:
    server.answers |= {f"/{n}": redirecting(f"/{n + 1}") for n in range(3)}
    server.answers["/3"] = answering(body=b"there")
    server.answers["/loop"] = redirecting("/loop")
    async with fetching(fetch_max_redirects=3) as fetcher:
        assert await fetch(fetcher, server.url("/0")) == b"there"
    async with fetching(fetch_max_redirects=2) as fetcher:
        assert code_of(await refusal(fetcher, server.url("/0"))) == (400, "media_fetch_failed")
        server.asked.clear()
        assert code_of(await refusal(fetcher, server.url("/loop"))) == (400, "media_fetch_failed")
        assert len(server.asked) == 3
    async with fetching(fetch_max_redirects=0) as fetcher:
        assert await fetch(fetcher, server.url("/3")) == b"there"
        assert code_of(await refusal(fetcher, server.url("/2"))) == (400, "media_fetch_failed")


async def test_what_an_operator_allows_is_fetched(forbidden: MediaServer) -> None:
    async with MediaServer(host="127.0.0.3", answers={"/": answering(body=b"x")}).running() as private:
        async with fetching() as fetcher:
            assert code_of(await refusal(fetcher, private.url())) == (400, "url_not_allowed")
        async with fetching(fetch_allowed_networks=(ip_network("127.0.0.3/32"),)) as fetcher:
            assert await fetch(fetcher, private.url()) == b"x"
            assert code_of(await refusal(fetcher, forbidden.url())) == (400, "url_not_allowed")


async def test_the_environments_proxy_is_not_asked(
    server: MediaServer, forbidden: MediaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, forbidden.url())
    async with fetching() as fetcher:
        assert await fetch(fetcher, server.url("/a.png")) == image_bytes(7)


async def test_the_operators_proxy_is_asked(forbidden: MediaServer) -> None:
    """It looks up names itself. What a URL itself says is checked here all the same."""
    async with MediaServer(host="127.0.0.3").running() as proxy:
        proxy.answers["http://media.test/a.png"] = answering(body=b"by proxy")
        proxy.answers["http://media.test/one"] = redirecting(forbidden.url())
        async with fetching(fetch_proxy=proxy.url()) as fetcher:
            assert await fetch(fetcher, "http://media.test/a.png?q") == b"by proxy"
            for url in (forbidden.url(), "http://media.test/one"):
                assert code_of(await refusal(fetcher, url)) == (400, "url_not_allowed")
    assert [asked.target for asked in proxy.asked] == ["http://media.test/a.png?q", "http://media.test/one"]


async def test_names_that_do_not_exist(forbidden: MediaServer) -> None:
    async with fetching() as fetcher:
        assert code_of(await refusal(fetcher, "http://nowhere.test/")) == (400, "media_fetch_failed")


async def test_a_name_server_that_does_not_answer() -> None:
    class Silent(ChosenNames):
        async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[object]:  # type: ignore[override]
            return await asyncio.get_running_loop().create_future()

    async with fetching(Silent(), fetch_timeout_s=0.2) as fetcher:
        with pytest.raises(RequestError) as caught:
            await fetch(fetcher, "http://slow.test/")
    assert code_of(caught.value) == (400, "media_fetch_timeout")
