"""TLS handshakes of the callers' port: few at once, bounded in a second, in turns of the callers' networks.

    accepted --first bytes--> ready --turn of its network--> handshake --> connection of the HTTP protocol
        `----- closed: its time is over, too many wait ------'-- closed: it stalls while others wait

A handshake costs about a millisecond of the event loop once the client's first bytes are read, and a caller
needs no key for it. So a connection waits outside of the loop's transports until these bytes are there.
"""

import asyncio
import itertools
import socket
import ssl
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv6Address, ip_address

MAX_AT_ONCE = 16  # handshakes in work, which the event loop may meet in one iteration
STALL_S = 1.0  # that a handshake may take while others wait for its place
MAX_READY_EACH = 64  # connections of one network that wait for a handshake
BURST = 16  # handshakes that may begin without a pause
_ACCEPTS = 64  # in one iteration of the event loop
RETRY_S = 1.0  # until the next try to accept where the process has no room for another connection
_NETWORK_BYTES = 8  # of an IPv6 address: the part that a caller cannot choose


@dataclass(eq=False, slots=True)
class _Connection:
    """Accepted connection whose handshake is not done."""

    sock: socket.socket
    network: bytes
    deadline: float  # of the loop's clock
    timer: asyncio.TimerHandle | None = None  # ends the wait for the handshake
    stalls_at: float = 0.0  # of the loop's clock, once the handshake has begun
    handshake: "asyncio.Task[None] | None" = None


class TlsListener:
    """Listener that gives connections to `protocol` as soon as their handshakes are done.

    It stands in for asyncio's server, which begins every handshake at once.
    """

    def __init__(
        self,
        sock: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        *,
        timeout_s: float,
        max_per_s: float,
        max_waiting: int,
        backlog: int,
    ) -> None:
        """Listen, on the running event loop.

        Args:
            timeout_s: from a connection's acceptance to the end of its handshake.
            max_per_s: handshakes that begin in a second.
            max_waiting: connections that wait for a handshake; beyond it one of them is closed.
        """
        self._loop = asyncio.get_running_loop()
        self._sock, self._protocol, self._context = sock, protocol, context
        self._timeout_s, self._pause_s, self._max_waiting = timeout_s, 1 / max_per_s, max_waiting
        self._silent: dict[_Connection, None] = {}  # the oldest first
        self._ready: OrderedDict[bytes, deque[_Connection]] = OrderedDict()  # by network, the next one first
        self._num_ready = 0
        self._working: dict[_Connection, None] = {}  # the oldest first
        self._rested_at = 0.0  # of the loop's clock: from then on a whole burst may begin
        self._timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        sock.listen(backlog)
        self._loop.add_reader(sock, self._accept)

    # ---- as uvicorn calls an asyncio server -------------------------------------------------------
    def close(self) -> None:
        """Accept no more, and close what has no handshake; connections of `protocol` stay."""
        self._loop.remove_reader(self._sock)
        if self._timer is not None:
            self._timer.cancel()
        for connection in (*self._silent, *itertools.chain.from_iterable(self._ready.values())):
            self._close(connection)
        self._silent.clear()
        self._ready.clear()
        self._num_ready = 0
        for connection in self._working:
            _end(connection)

    async def wait_closed(self) -> None:
        ended = [each.handshake for each in self._working if each.handshake is not None]
        await asyncio.gather(*ended, return_exceptions=True)

    # ---- accepted: nothing has come ---------------------------------------------------------------
    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, address = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # too many open files, or no memory
                self._loop.remove_reader(self._sock)
                self._loop.call_later(RETRY_S, self._accept_again)
                return
            sock.setblocking(False)
            connection = _Connection(sock, network_of(address[0]), self._loop.time() + self._timeout_s)
            connection.timer = self._loop.call_at(connection.deadline, self._drop_silent, connection)
            self._silent[connection] = None
            self._loop.add_reader(sock, self._on_bytes, connection)
            if len(self._silent) + self._num_ready > self._max_waiting:
                self._drop_silent(next(iter(self._silent)))

    def _accept_again(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock, self._accept)

    def _drop_silent(self, connection: _Connection) -> None:
        del self._silent[connection]
        self._close(connection)

    def _on_bytes(self, connection: _Connection) -> None:
        """Queue a connection whose first bytes, or end, are there to be read."""
        del self._silent[connection]
        _stop_waiting(self._loop, connection)
        ready = self._ready.setdefault(connection.network, deque())
        if len(ready) >= MAX_READY_EACH:
            connection.sock.close()
            return
        ready.append(connection)
        self._num_ready += 1
        self._begin_next()

    # ---- handshakes -------------------------------------------------------------------------------
    def _begin_next(self) -> None:
        """Begin as many handshakes as may begin now, and set the timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        while self._ready and len(self._working) < MAX_AT_ONCE and self._next_at <= now:
            network, ready = self._ready.popitem(last=False)
            connection = ready.popleft()
            self._num_ready -= 1
            if ready:
                self._ready[network] = ready  # behind the other networks
            if connection.deadline <= now:
                connection.sock.close()
                continue
            self._rested_at = max(self._rested_at, now) + self._pause_s
            connection.stalls_at = now + STALL_S
            self._working[connection] = None
            connection.handshake = self._loop.create_task(self._shake_hands(connection))
            connection.handshake.add_done_callback(partial(self._on_end, connection))
        if not self._ready:
            return
        if len(self._working) < MAX_AT_ONCE:
            self._timer = self._loop.call_at(self._next_at, self._begin_next)
            return
        oldest = next(iter(self._working))
        if oldest.stalls_at <= now:
            _end(oldest)  # which begins the next one
        else:
            self._timer = self._loop.call_at(oldest.stalls_at, self._begin_next)

    @property
    def _next_at(self) -> float:
        """Time of the loop's clock from which the next handshake may begin."""
        return self._rested_at - (BURST - 1) * self._pause_s

    async def _shake_hands(self, connection: _Connection) -> None:
        async with asyncio.timeout_at(connection.deadline):
            await self._loop.connect_accepted_socket(
                self._protocol, connection.sock, ssl=self._context, ssl_handshake_timeout=self._timeout_s
            )

    def _on_end(self, connection: _Connection, task: "asyncio.Task[None]") -> None:
        """Give the place to the next one, also where the task was cancelled before it began."""
        del self._working[connection]
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:  # it stalls, the gateway ends, or the client is at fault
            connection.sock.close()
        if error is not None and not isinstance(error, OSError):
            self._loop.call_exception_handler({"message": "TLS handshake failed", "exception": error})
        if self._sock.fileno() >= 0:
            self._begin_next()

    def _close(self, connection: _Connection) -> None:
        _stop_waiting(self._loop, connection)
        connection.sock.close()


def _stop_waiting(loop: asyncio.AbstractEventLoop, connection: _Connection) -> None:
    loop.remove_reader(connection.sock)
    if connection.timer is not None:
        connection.timer.cancel()
        connection.timer = None


def _end(connection: _Connection) -> None:
    if connection.handshake is not None:
        connection.handshake.cancel()


def network_of(address: str) -> bytes:
    """Return what of a caller's address takes one turn: an IPv4 address, or an IPv6 network."""
    ip = ip_address(address)
    if not isinstance(ip, IPv6Address):
        return ip.packed
    return ip.packed[:_NETWORK_BYTES] if ip.ipv4_mapped is None else ip.ipv4_mapped.packed
