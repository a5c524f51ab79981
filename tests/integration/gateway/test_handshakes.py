"""TLS handshakes of strangers: many at once stop no event loop, and keep nobody out."""

import asyncio
import resource
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.certificates import Authority
from tests.support.gateway.process import environment, process_of
from tests.support.hostile.loop_probe import probe_environment, read_stops, reset_stops
from tests.support.waiting import free_port, until, until_async
from triptych_common.runtime import bind_tcp
from triptych_gateway import handshakes
from triptych_gateway.handshakes import MAX_AT_ONCE, MAX_READY_EACH, TlsListener, network_of

FLOOD_ADDRESS = "127.0.0.2"
NUM_FLOOD = 1500
MAX_STOP_S = 0.25


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.server_context("localhost")
    return made


def client_hello() -> bytes:
    """The first bytes of a handshake; a stranger can send the same ones many times."""
    outgoing = ssl.MemoryBIO()
    session = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


@contextmanager
def connected(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections of a stranger on which nothing was sent."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(("127.0.0.1", port), source_address=(FLOOD_ADDRESS, 0))
            )
            for _ in range(number)
        ]


class Greeting(asyncio.Protocol):
    """Sends one byte as soon as the handshake is done."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"!")
        transport.close()


@asynccontextmanager
async def listening(
    authority: Authority, *, timeout_s: float = 60.0, max_per_s: float = 1e6, max_waiting: int = 2000
) -> AsyncIterator[tuple[TlsListener, int]]:
    """Yield a listener and its port."""
    (sock,) = bind_tcp("127.0.0.1", 0)
    listener = TlsListener(
        sock, Greeting, authority.server_context("localhost"),
        timeout_s=timeout_s, max_per_s=max_per_s, max_waiting=max_waiting, backlog=2048,
    )  # fmt: skip
    try:
        yield listener, sock.getsockname()[1]
    finally:
        listener.close()
        sock.close()
        await listener.wait_closed()


async def greeted(port: int, authority: Authority) -> bytes:
    """Return what an ordinary client gets."""
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    reader, writer = await asyncio.open_connection("localhost", port, ssl=context, family=socket.AF_INET)
    content = await reader.read()
    writer.close()
    return content


async def ended(connection: socket.socket) -> None:
    """Wait until the listener closes a connection."""
    connection.setblocking(False)
    try:
        while await asyncio.get_running_loop().sock_recv(connection, 1 << 16):
            pass
    except ConnectionError:
        pass


@pytest.mark.slow
async def test_a_flood_of_handshakes_stops_no_event_loop(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    """Their first bytes are all there when the gateway looks."""
    port, internal, probed = free_port(), free_port(), tmp_path / "probed"
    probed.mkdir()
    env = environment(redis_url, tmp_path, port) | probe_environment(probed)
    env |= {
        "TRIPTYCH_TLS_CERT_FILE": str(authority.folder / "localhost.pem"),
        "TRIPTYCH_INTERNAL_PORT": str(internal),
    }
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    hello = client_hello()
    async with (
        process_of(env) as process,
        httpx.AsyncClient(verify=context, trust_env=False, timeout=60) as http,
    ):

        async def is_answered(client: httpx.AsyncClient) -> bool:
            try:
                return (await client.get(f"https://localhost:{port}/health")).status_code == 503
            except httpx.TransportError:
                return False

        await until_async(lambda: is_answered(http), 180)
        with connected(port, NUM_FLOOD) as flood:
            await reset_stops(probed)
            process.send_signal(signal.SIGSTOP)
            for each in flood:
                each.send(hello)
            process.send_signal(signal.SIGCONT)
            async with httpx.AsyncClient(verify=context, trust_env=False, timeout=60) as another:
                assert await is_answered(another)
            await asyncio.gather(*(ended(each) for each in flood))
        (stops,) = (each for each in read_stops(probed) if each.pid == process.pid)
    assert stops.longest_cpu_s <= MAX_STOP_S, stops


async def test_few_handshakes_are_in_work_and_each_network_has_its_turn(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "STALL_S", 0.2)
    hello, most = client_hello(), 0
    async with listening(authority) as (listener, port):
        with connected(port, 3 * MAX_READY_EACH) as flood:
            for each in flood:
                each.send(hello)
            await until(lambda: len(listener._working) == MAX_AT_ONCE)
            asked = asyncio.create_task(greeted(port, authority))
            num_ended = [asyncio.create_task(ended(each)) for each in flood]
            while not asked.done():
                most = max(most, len(listener._working))
                await asyncio.sleep(0)
            assert await asked == b"!"
            still_there = sum(not each.done() for each in num_ended)
            assert still_there >= MAX_AT_ONCE, "the neighbour did not wait for all others"
            for waiting in num_ended:
                waiting.cancel()
            await asyncio.gather(*num_ended, return_exceptions=True)
    assert most == MAX_AT_ONCE


async def test_no_more_handshakes_begin_in_a_second_than_allowed(authority: Authority) -> None:
    """A burst begins at once; the next one would wait for a day."""
    async with listening(authority, max_per_s=1e-5) as (listener, port):
        for _ in range(handshakes.BURST):
            assert await greeted(port, authority) == b"!"
        with connected(port, 1) as (late,):
            late.send(client_hello())
            await until(lambda: listener._num_ready == 1)
            assert len(listener._working) == 0


async def test_the_oldest_silent_connection_gives_way(authority: Authority) -> None:
    async with listening(authority, max_waiting=4) as (_, port):
        with connected(port, 5) as silent:
            await ended(silent[0])
            assert await greeted(port, authority) == b"!", "which closes the second one"
            await ended(silent[1])
            for each in silent[2:]:
                each.setblocking(False)
                with pytest.raises(BlockingIOError):
                    each.recv(1)


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01"], ids=["none", "http", "part"]
)
async def test_a_handshake_that_does_not_end_is_closed(authority: Authority, sent: bytes) -> None:
    async with listening(authority, timeout_s=0.3) as (listener, port):
        with connected(port, 1) as (connection,):
            connection.send(sent)
            await ended(connection)
        await until(lambda: len(listener._working) == 0)


async def test_a_closing_listener_closes_what_has_no_handshake(authority: Authority) -> None:
    async with listening(authority, max_per_s=1e-5) as (listener, port):
        with connected(port, MAX_AT_ONCE + 2) as connections:
            for each in connections[:-1]:
                each.send(client_hello())
            await until(lambda: listener._num_ready == 1)
            listener.close()
            await asyncio.gather(*(ended(each) for each in connections))
            await listener.wait_closed()


async def test_a_lack_of_files_is_waited_for(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "RETRY_S", 0.01)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening(authority) as (_, port):
        with connected(port, 1) as (connection,):
            lowest = socket.socket()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno(), limits[1]))
            lowest.close()
            try:
                for _ in range(3):
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert await greeted(port, authority) == b"!"
            connection.close()


def test_an_ipv6_network_is_one_caller() -> None:
    assert network_of("2001:db8:0:1::1") == network_of("2001:db8:0:1:ffff::2")
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8:0:2::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")
