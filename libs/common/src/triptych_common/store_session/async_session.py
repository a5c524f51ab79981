"""AsyncStoreSession: the store's client for asyncio services."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from triptych_common.domain.errors import (
    StoreProtocolError,
    StoreUnavailableError,
    TriptychError,
    store_error,
)
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreFrame, StoreReply, Welcome
from triptych_common.region.slot_lock import SlotLock
from triptych_common.store_session.dial import FIRST_RETRY_S, LAST_RETRY_S
from triptych_common.store_session.resumption import Request
from triptych_common.store_session.session_state import (
    Push,
    SessionOptions,
    SessionState,
    call_owner,
    disconnected,
)
from triptych_common.telemetry.logs import get_logger

OnPush = Callable[[Push], None]
OnDisconnect = Callable[[Exception | None], None]
OnReconnect = Callable[[Welcome], None]

log = get_logger(__name__)

Expected = TypeVar("Expected", bound=StoreFrame)


class AsyncStoreSession:
    """A session with the store. `welcome` has the region's place; a reconnect renews it.

    The callbacks run in the event loop and must not block; `on_disconnect` runs once at the session's end,
    with None after `close`. With `reconnect_timeout_s` a break of that length is bridged: pins and
    reservations stay, requests wait, and `on_reconnect` is called after it. For one event loop; also an async
    context manager that closes.
    """

    def __init__(self, socket_path: str | Path, client_name: str, options: SessionOptions) -> None:
        self._path = str(socket_path)
        self._options = options
        self._state: SessionState[asyncio.Future[StoreReply]] = SessionState(
            client_name, options.namespace_digest
        )
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None  # None: not connected
        self._unsent: list[Request[asyncio.Future[StoreReply]]] = []  # while not connected
        self._lock: SlotLock | None = None
        self._reconnecting: asyncio.Task[None] | None = None
        self._closing = False
        self._ended = self._loop.create_future()
        self._error: Exception | None = None

    @classmethod
    async def connect(
        cls,
        socket_path: str | Path,
        client_name: str,
        *,
        on_push: OnPush | None = None,
        on_disconnect: OnDisconnect | None = None,
        on_reconnect: OnReconnect | None = None,
        timeout_s: float = 10.0,
        reconnect_timeout_s: float = 0.0,
        namespace_digest: str | None = None,
    ) -> "AsyncStoreSession":
        """Connect and send hello.

        Raises:
            StoreUnavailableError: no store there, or it does not answer in time.
            StoreError: the store refuses this client.
        """
        options = SessionOptions(
            on_push=on_push,
            on_disconnect=on_disconnect,
            on_reconnect=on_reconnect,
            timeout_s=timeout_s,
            reconnect_timeout_s=reconnect_timeout_s,
            namespace_digest=namespace_digest,
        )
        session = cls(socket_path, client_name, options)
        await session._dial()
        try:
            session._lock = SlotLock(session.welcome.region_path, session.welcome.client_slot)
        except BaseException:
            await session.close()
            raise
        return session

    async def __aenter__(self) -> "AsyncStoreSession":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def welcome(self) -> Welcome:
        """The store's last answer to hello."""
        return cast(Welcome, self._state.welcome)

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def submit(self, command: StoreCommand) -> "asyncio.Future[StoreReply]":
        """Send `command` (its `seq` is set here). Never blocks.

        The future gets the reply, which may be a `StoreFailure`; it gets `StoreUnavailableError` if the
        session ends first.
        """
        future: asyncio.Future[StoreReply] = self._loop.create_future()
        if self._closing or self._ended.done():
            future.set_exception(disconnected("the session with the store has ended"))
            future.exception()  # its waiter sees it; a fire-and-forget command need not
        else:
            self._send(Request(command, future))
        return future

    async def request(self, command: StoreCommand, timeout_s: float = 10.0) -> StoreReply:
        """Send `command` and wait for its reply.

        Raises:
            StoreUnavailableError: the session ended, or no reply in time (the command may still take effect).
            StoreError: the store refused; the class follows the code.
        """
        try:
            reply = await asyncio.wait_for(self.submit(command), timeout_s)
        except TimeoutError:
            raise StoreUnavailableError(f"no answer in {timeout_s} s", code="timeout") from None
        if isinstance(reply, StoreFailure):
            raise store_error(reply)
        return reply

    async def close(self) -> None:
        """End the session: the store gives back everything it held. May be called twice."""
        self._closing = True
        if self._lock is not None:
            self._lock.close()
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reconnecting
        if self._transport is not None:
            self._transport.abort()
        elif not self._ended.done():
            self._end(None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ended), 5.0)

    # ---- connecting ------------------------------------------------------------------------------
    async def _dial(self) -> None:
        """Connect, send hello, and send waiting requests.

        Raises:
            StoreUnavailableError: no store there, no answer in time, or (code lease_lost) another region.
            StoreError: the store refuses this client.
        """
        try:
            async with asyncio.timeout(self._options.timeout_s):
                welcomed: asyncio.Future[None] = self._loop.create_future()
                protocol = _Protocol(self._on_data, self._on_lost, self._state, welcomed)
                transport, _ = await self._loop.create_unix_connection(lambda: protocol, self._path)
                try:
                    if not transport.is_closing():  # else `welcomed` has the reason
                        transport.write(self._state.begin_connection())
                    await welcomed
                except BaseException:
                    transport.abort()
                    raise
        except OSError as error:  # TimeoutError is one
            raise StoreUnavailableError(f"cannot connect to the store: {error}") from error
        self._transport = transport
        waiting, self._unsent = [*protocol.repeats, *self._unsent], []
        for request in waiting:
            self._send(request)

    def _send(self, request: Request[asyncio.Future[StoreReply]]) -> None:
        if self._transport is None or self._transport.is_closing():
            self._unsent.append(request)
            return
        try:
            self._transport.write(self._state.frame_request(request))
        except TriptychError as error:  # too large for a frame
            if request.pending is not None:
                request.pending.set_exception(error)

    async def _reconnect(self, cause: Exception) -> None:
        deadline, retry_s, error = self._loop.time() + self._options.reconnect_timeout_s, FIRST_RETRY_S, cause
        while self._loop.time() < deadline:
            try:
                await self._dial()
            except StoreUnavailableError as unavailable:
                error = unavailable
                if unavailable.code == "lease_lost":
                    break
            except TriptychError as refused:
                error = refused
                break
            else:
                self._reconnecting = None
                call_owner(self._options.on_reconnect, self.welcome)
                return
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        self._reconnecting = None
        self._end(error)

    # ---- called by the transport -----------------------------------------------------------------
    def _on_data(self, data: bytes) -> None:
        try:
            for pending, reply in self._state.on_data(data):
                if pending is None:
                    call_owner(self._options.on_push, cast(Push, reply))
                elif not pending.done():  # cancelled, or given up on
                    pending.set_result(reply)
        except TriptychError as error:
            self._error = error
            if self._transport is not None:
                self._transport.abort()

    def _on_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._closing:
            self._end(None)
        elif self._error is not None or self._options.reconnect_timeout_s <= 0:
            self._end(self._error or error or disconnected("the store closed the session"))
        else:
            cause = error or disconnected("the store closed the session")
            self._reconnecting = self._loop.create_task(self._reconnect(cause), name="store-reconnect")

    def _end(self, error: Exception | None) -> None:
        if self._ended.done():
            return
        self._ended.set_result(None)
        if self._lock is not None:
            self._lock.close()
        pending = self._state.take_pending()
        pending += [request.pending for request in self._unsent if request.pending is not None]
        self._unsent = []
        for future in pending:
            if not future.done():
                future.set_exception(disconnected(f"the session with the store ended: {error or 'closed'}"))
                future.exception()  # its waiter sees it; one that has gone away need not
        call_owner(self._options.on_disconnect, error)


class _Protocol(asyncio.Protocol):
    """Protocol of one connection: its first frame is the welcome, the rest are the session's."""

    def __init__(
        self,
        on_data: Callable[[bytes], None],
        on_lost: Callable[[Exception | None], None],
        state: SessionState[asyncio.Future[StoreReply]],
        welcomed: "asyncio.Future[None]",
    ) -> None:
        self.repeats: list[Request[asyncio.Future[StoreReply]]] = []
        self._on_data = on_data
        self._on_lost = on_lost
        self._state = state
        self._welcomed = welcomed

    def data_received(self, data: bytes) -> None:
        if self._welcomed.done():
            self._on_data(data)
            return
        try:
            repeats = self._state.on_welcome(data)
        except TriptychError as error:
            self._welcomed.set_exception(error)
        else:
            if repeats is not None:
                self.repeats = repeats
                self._welcomed.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(disconnected(f"the store closed the session at hello: {exc}"))
        elif not self._welcomed.cancelled() and self._welcomed.exception() is None:
            self._on_lost(exc)


async def request_within(
    session: AsyncStoreSession,
    command: StoreCommand,
    timeout_s: float,
    undo: Callable[[StoreReply], None],
    *expected: type[Expected],
) -> Expected:
    """Return the store's answer of one of the `expected` types, after its restart if need be.

    An answer that is late, or follows a cancellation of the caller, goes to `undo`: nothing stays held.

    Raises:
        StoreProtocolError: the answer has another type.
        StoreError: the store refused, is gone, or did not answer within `timeout_s` seconds.
    """

    def undo_late(late: "asyncio.Future[StoreReply]") -> None:
        if not late.cancelled() and late.exception() is None:
            undo(late.result())

    future = session.submit(command)
    try:
        await asyncio.wait({future}, timeout=timeout_s)
    except asyncio.CancelledError:  # the answer may have arrived just now: undo it
        future.add_done_callback(undo_late)
        raise
    if not future.done():
        future.add_done_callback(undo_late)
        raise StoreUnavailableError(f"no answer in {timeout_s:g} s", code="timeout")
    reply = future.result()
    if isinstance(reply, StoreFailure):
        raise store_error(reply)
    if not isinstance(reply, expected):
        raise StoreProtocolError("bad_frame", f"the store answered {reply.kind!r} to {command.kind!r}")
    return reply


def submit_final(session: AsyncStoreSession, command: StoreCommand) -> None:
    """Send a command that ends something; if it is lost, the end of the session has the same effect."""
    session.submit(command).add_done_callback(_log_failure)


def _log_failure(future: "asyncio.Future[StoreReply]") -> None:
    if not future.cancelled() and future.exception() is not None:
        log.info("store command not sent", error=str(future.exception()))
