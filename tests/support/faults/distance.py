"""Redis at a distance: a proxy that delays all bytes in both directions, and counts round trips.

Bytes are delayed, not put in a queue for one another: what is sent at once arrives at once, as over a long
cable. The replies to chosen round trips can be held back.
"""

import asyncio
import contextlib
import hashlib
import selectors
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.faults.tcp_proxy import CHUNK, TcpProxy
from triptych_common.bus.consumer_group import TAKE_SPARE
from triptych_common.coordination import entry_directory, registry, single_flight
from triptych_common.redis_client.scripts import EXTEND_EXPIRY, LuaScript

_SCRIPTS = (
    *(each for each in vars(single_flight).values() if isinstance(each, LuaScript)),
    *(each for each in vars(registry).values() if isinstance(each, LuaScript)),
    entry_directory.ADD_PLACE, entry_directory.REMOVE_PLACE, entry_directory.SET_FIELD,
    TAKE_SPARE, EXTEND_EXPIRY,
)  # fmt: skip
_SCRIPT_NAMES = {
    name: each.name
    for each in _SCRIPTS
    for name in (each.text.encode(), hashlib.sha1(each.text.encode()).hexdigest().encode())  # noqa: S324
}
_WITHOUT_REQUESTS = frozenset(
    {
        "XREADGROUP", "XPENDING", "XCLAIM", "renew_job", "take_spare",  # waits for entries, and leases
        "beat", "MULTI", "ZRANGE", "MGET",  # heartbeats and the registry
        "AUTH", "CLIENT", "INFO", "SELECT", "SCRIPT", "TIME",  # a new connection
    }
)  # fmt: skip
_KEYS_BEGIN_WITH = b"triptych:"
_END = b"\r\n"


class IncompleteError(Exception):
    """The rest has not come yet."""


class RespReader:
    """Requests and replies of RESP2, out of pieces of any size.

    hiredis reads them too, but where it is installed redis-py takes it for every client.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def take(self, data: bytes) -> list[Any]:
        """Add `data` and return the messages that are whole now."""
        self._buffer += data
        found: list[Any] = []
        position = 0
        while position < len(self._buffer):
            try:
                value, position = _parse(self._buffer, position)
            except IncompleteError:
                break
            found.append(value)
        del self._buffer[:position]
        return found


@dataclass(eq=False)
class RoundTrip:
    """One, of the client that calls itself `client`."""

    client: str
    commands: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Whose, and what its first command is: `gateway claim_flight`."""
        return f"{self.client.partition('-')[0]} {self.commands[0]}"

    @property
    def is_of_request(self) -> bool:
        """Not of what goes on without any, with the acks that go out with a wait for entries."""
        return not any(each.split(" ")[0] in _WITHOUT_REQUESTS for each in self.commands)


class ConnectionWatch:
    """One connection. New round trips are appended to `trips`."""

    def __init__(self, trips: list[RoundTrip]) -> None:
        self._trips = trips
        self._requests, self._replies = RespReader(), RespReader()
        self._num_unanswered = 0
        self._current: RoundTrip | None = None
        self._client = ""

    def on_request(self, data: bytes) -> None:
        for command in self._requests.take(data):
            if command[0].upper() == b"CLIENT" and command[1].upper() == b"SETNAME":
                self._client = command[2].decode()
            if self._current is None or self._num_unanswered == 0:
                self._current = RoundTrip(self._client)
                self._trips.append(self._current)
            self._current.commands.append(name_of(command))
            self._num_unanswered += 1

    def on_reply(self, data: bytes) -> RoundTrip | None:
        """Count the replies in `data`; return the round trip that they answer."""
        self._num_unanswered -= len(self._replies.take(data))
        return self._current


def name_of(command: list[bytes]) -> str:
    """A script by its name, anything else with the kind of its first key: `HGET sizes`."""
    verb = command[0].decode().upper()
    if verb in ("EVAL", "EVALSHA"):
        return _SCRIPT_NAMES.get(command[1], verb)
    keys = (each for each in command[1:] if each.startswith(_KEYS_BEGIN_WITH))
    kind = next((each.split(b":")[2].decode().strip("{}") for each in keys), "")
    return f"{verb} {kind}".strip()


def counted(trips: Iterable[RoundTrip]) -> Counter[str]:
    """Count the round trips of requests by name."""
    return Counter(each.name for each in trips if each.is_of_request)


def _parse(buffer: bytearray, position: int) -> tuple[Any, int]:
    """Return the message that begins at `position`, and where the next one begins."""
    line_end = buffer.find(_END, position)
    if line_end < 0:
        raise IncompleteError
    kind, rest, end = buffer[position : position + 1], bytes(buffer[position + 1 : line_end]), line_end + 2
    if kind == b"$":
        length = int(rest)
        if length < 0:
            return None, end
        if len(buffer) < end + length + 2:
            raise IncompleteError
        return bytes(buffer[end : end + length]), end + length + 2
    if kind != b"*":
        return rest, end
    items = []
    for _ in range(int(rest)):
        item, end = _parse(buffer, end)
        items.append(item)
    return items, end


Chosen = Callable[[RoundTrip], bool]


class DistantRedis(TcpProxy):
    """Redis at the Unix socket `target` is `round_trip_s` away, which may change at any time.

    `listener`: where clients connect to; None: a port of 127.0.0.1.
    """

    def __init__(self, target: Path, listener: socket.socket | None = None) -> None:
        # `select` waits for microseconds exactly; the default selector would round each delay up to 1 ms.
        super().__init__(target, loop=asyncio.SelectorEventLoop(selectors.SelectSelector()))
        self.round_trip_s = 0.0
        self.num_given_up = 0  # connections whose client did not wait for what was held back
        self._listener = listener
        self._trips: list[RoundTrip] = []
        self._watches: defaultdict[int, ConnectionWatch] = defaultdict(lambda: ConnectionWatch(self._trips))
        self._holds: Chosen = lambda trip: False
        self._may_go = asyncio.Event()
        self._may_go.set()
        self.held: list[RoundTrip] = []  # since `holding` began

    def take_trips(self) -> list[RoundTrip]:
        """Those that have begun since the last call."""
        taken = list(self._trips)
        del self._trips[: len(taken)]
        return taken

    @contextlib.contextmanager
    def holding(self, chosen: Chosen) -> Iterator[None]:
        """Until the block ends, no reply to a round trip that is `chosen` arrives, nor one after it."""
        self.held, self.num_given_up, self._holds = [], 0, chosen
        self._loop.call_soon_threadsafe(self._may_go.clear)
        try:
            yield
        finally:
            self._holds = lambda trip: False
            self._loop.call_soon_threadsafe(self._may_go.set)

    # ---- on the proxy's thread ----
    async def _listen(self, port: int) -> asyncio.Server:
        if self._listener is None:
            return await super()._listen(port)
        return await asyncio.start_server(self._serve, sock=self._listener)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int, *, is_reply: bool
    ) -> None:
        loop, watch = asyncio.get_running_loop(), self._watches[number]
        waiting: asyncio.Queue[tuple[float, bytes, RoundTrip | None]] = asyncio.Queue()
        delivering = loop.create_task(self._deliver(waiting, writer))
        try:
            data = b"?"
            while data:
                data = await reader.read(CHUNK)
                trip = None
                if is_reply:
                    trip = watch.on_reply(data)
                else:
                    watch.on_request(data)
                waiting.put_nowait((loop.time() + self.round_trip_s / 2, data, trip))
            await delivering
        finally:
            delivering.cancel()
            await asyncio.gather(delivering, return_exceptions=True)

    async def _deliver(self, waiting: "asyncio.Queue[Any]", writer: asyncio.StreamWriter) -> None:
        """All that comes, when it is due."""
        loop = asyncio.get_running_loop()
        while True:
            due_at, data, trip = await waiting.get()
            if not data:
                return
            if trip is not None and self._holds(trip):
                await self._hold(trip)
            if (left_s := due_at - loop.time()) > 0:
                await asyncio.sleep(left_s)
            writer.write(data)
            await writer.drain()

    async def _hold(self, trip: RoundTrip) -> None:
        self.held.append(trip)
        try:
            await self._may_go.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise


@contextlib.contextmanager
def distant_redis(target: Path, listener: socket.socket | None = None) -> Iterator[DistantRedis]:
    """It runs; gone at the end."""
    with DistantRedis(target, listener) as proxy:
        yield proxy
