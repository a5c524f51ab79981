"""Redis at a distance: a proxy that delays all bytes in both directions, and counts round trips.

Bytes are delayed, not put in a queue for one another: what is sent at once arrives at once, as over a long
cable. The replies to chosen round trips can be held back.
"""

import asyncio
import contextlib
import selectors
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.faults.round_trips import ConnectionWatch, RoundTrip
from tests.support.faults.tcp_proxy import CHUNK, TcpProxy

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
