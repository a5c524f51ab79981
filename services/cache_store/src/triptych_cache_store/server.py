"""Unix socket server around the core: frames in, frames out. One connection is one session."""

import asyncio
import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from triptych_cache_store.core.state import Outgoing
from triptych_cache_store.core.store_core import StoreCore
from triptych_cache_store.entries.leases import SessionId
from triptych_common.domain.errors import MalformedMessageError, StoreUnavailableError
from triptych_common.protocol.codec import FrameDecoder, decode_command, frame
from triptych_common.protocol.store import StoreFailure, StoreReply
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FIRST_REAP_S = 0.001
LAST_REAP_S = 1.0
EVICTIONS_PER_STEP = 16
CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: the kernel's struct ucred


class Connection(asyncio.Protocol):
    """One client. Reading pauses while it does not read replies; past the limit it is disconnected."""

    def __init__(self, server: "StoreServer", session_id: SessionId) -> None:
        self._server = server
        self.session_id = session_id
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        peer_uid = _peer_uid(self._transport)
        if peer_uid != os.getuid():
            log.warning("client of another user refused", uid=peer_uid)
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=self._server.max_unsent_bytes // 4)
        self._server.connections.add_connection(self)

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._decoder.feed(data)
        except MalformedMessageError as error:
            self._refuse(str(error))
            return
        for body in bodies:
            if self._transport is None or self._transport.is_closing():
                return
            try:
                command = decode_command(body)
            except MalformedMessageError as error:
                self._refuse(str(error))
                return
            try:
                out = self._server.core.handle(self.session_id, command, time.monotonic())
            except Exception:  # a fault of ours: it costs this session, not the store
                log.exception("store command failed", session_id=self.session_id, kind=command.kind)
                failure = StoreFailure(seq=command.seq, code="internal", detail="a fault in the store")
                self.send(failure, closes=True)
                return
            if len(out) > 1:  # others first: they wait for a tensor, the caller only for a confirmation
                out.sort(key=lambda each: each.session_id == self.session_id)
            self._server.connections.deliver(out)
        self._server.relieve_soon()
        self._server.on_commands()

    def pause_writing(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.on_closed(self)

    def send(self, reply: StoreReply, *, closes: bool) -> None:
        """Send without waiting; a client with too many unread bytes is disconnected."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame(reply))
        if self._transport.get_write_buffer_size() > self._server.max_unsent_bytes:
            log.warning("client does not read its replies, cut off", session_id=self.session_id)
            self._transport.abort()
        elif closes:
            self._transport.close()

    def is_alive(self) -> bool:
        """True if the kernel still sees the peer's end open."""
        if self._transport is None or self._transport.is_closing():
            return False
        poll = select.poll()
        poll.register(_socket_of(self._transport).fileno(), select.POLLRDHUP)
        return not poll.poll(0)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _refuse(self, detail: str) -> None:
        """Close a session that sent a malformed frame; later bytes cannot be interpreted."""
        log.warning("malformed frame, session closed", session_id=self.session_id, detail=detail)
        self.send(StoreFailure(seq=0, code="bad_frame", detail=detail), closes=True)


class Connections:
    """Connections of all sessions, through which the core and the verifier reply."""

    def __init__(self) -> None:
        self._by_session: dict[SessionId, Connection] = {}

    def is_connected(self, session_id: SessionId) -> bool:
        connection = self._by_session.get(session_id)
        return connection is not None and connection.is_alive()

    def deliver(self, outgoing: Iterable[Outgoing]) -> None:
        """Send the frames that the core returned."""
        for session_id, reply, closes in outgoing:
            connection = self._by_session.get(session_id)
            if connection is not None:
                connection.send(reply, closes=closes)

    def add_connection(self, connection: Connection) -> None:
        self._by_session[connection.session_id] = connection

    def remove_connection(self, connection: Connection) -> bool:
        """Remove a connection; False if it was removed before."""
        return self._by_session.pop(connection.session_id, None) is not None

    def abort_all(self) -> None:
        connections = list(self._by_session.values())
        self._by_session.clear()
        for connection in connections:
            connection.abort()


class StoreServer:
    """Listens, and carries frames between connections and the core.

    `on_commands` is called after the commands of one read.
    """

    def __init__(
        self,
        core: StoreCore,
        connections: Connections,
        on_commands: Callable[[], None],
        *,
        max_unsent_bytes: int,
    ) -> None:
        self.core = core
        self.connections = connections
        self.on_commands = on_commands
        self.max_unsent_bytes = max_unsent_bytes
        self._next_session = 1
        self._server: asyncio.Server | None = None
        self._reaper: asyncio.TimerHandle | None = None
        self._relief: asyncio.Handle | None = None
        self._path: Path | None = None

    async def serve(self, path: Path) -> None:
        """Listen at `path`, mode 0600.

        Raises:
            StoreUnavailableError: another store listens there, or the socket cannot be made.
        """
        _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            old_mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(old_mask)
            listener.listen(128)
            listener.setblocking(False)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self._new_connection, sock=listener)
        except OSError as error:
            listener.close()
            raise StoreUnavailableError(f"cannot listen at {path}: {error.strerror or error}") from error
        self._path = path

    async def close(self) -> None:
        """Stop listening, end all sessions, remove the socket.

        The clients' leases stay in the region for the next store. No timer of this server runs afterwards, so
        the region may be closed.
        """
        if self._reaper is not None:
            self._reaper.cancel()
        if self._relief is not None:
            self._relief.cancel()
        if self._server is not None:
            self._server.close()
        self.connections.abort_all()
        if self._server is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 5.0)
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def on_closed(self, connection: Connection) -> None:
        if self.connections.remove_connection(connection):
            self.connections.deliver(self.core.disconnect(connection.session_id, time.monotonic()))
            self.watch_detached()

    def watch_detached(self, delay_s: float = FIRST_REAP_S) -> None:
        """Check clients without a connection periodically: releasing a lock causes no event.

        A dying process closes its socket an instant before its lock, hence the short first delay.
        """
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None
        if self.core.num_detached:
            loop = asyncio.get_running_loop()
            self._reaper = loop.call_later(delay_s, self._reap, delay_s)

    def relieve_soon(self) -> None:
        """Evict in the background, in small steps, down to the low watermark."""
        if self._relief is None and self.core.space.needs_relief:
            self._relief = asyncio.get_running_loop().call_soon(self._relieve)

    def _relieve(self) -> None:
        self._relief = None
        if self.core.space.relieve(EVICTIONS_PER_STEP):
            self._relief = asyncio.get_running_loop().call_soon(self._relieve)

    def _reap(self, delay_s: float) -> None:
        self._reaper = None
        self.connections.deliver(self.core.reap(time.monotonic()))
        self.watch_detached(min(2 * delay_s, LAST_REAP_S))

    def _new_connection(self) -> Connection:
        session_id = SessionId(self._next_session)
        self._next_session += 1
        return Connection(self, session_id)


def _socket_of(transport: asyncio.Transport) -> socket.socket:
    return cast(socket.socket, transport.get_extra_info("socket"))


def _peer_uid(transport: asyncio.Transport) -> int:
    raw = _socket_of(transport).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(raw)[1])


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except ConnectionRefusedError:  # also by what is no socket
            if not path.is_socket():
                raise StoreUnavailableError(f"cannot listen at {path}: it is not a socket") from None
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise StoreUnavailableError(f"cannot listen at {path}: {error}") from error
    raise StoreUnavailableError(f"another store listens at {path}")
