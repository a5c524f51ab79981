"""AsyncStoreSession: the store's client for asyncio services."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import cast

from triptych_common.domain.errors import StoreUnavailableError, TriptychError, store_error
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreReply, Welcome
from triptych_common.region.session import Push, SessionMatcher, disconnected, hello

_log = logging.getLogger(__name__)

OnPush = Callable[[Push], None]
OnDisconnect = Callable[[Exception | None], None]


class AsyncStoreSession:
    """A session with the store. `welcome` says where the region is.

    `on_push` and `on_disconnect` are called in the event loop and must not block; `on_disconnect` once,
    with None after `close`. For one event loop; also an async context manager that closes.
    """

    def __init__(self, *, on_push: OnPush | None, on_disconnect: OnDisconnect | None) -> None:
        self.welcome: Welcome  # set by `connect`
        self._on_push = on_push
        self._on_disconnect = on_disconnect
        self._matcher: SessionMatcher[asyncio.Future[StoreReply]] = SessionMatcher()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closed = self._loop.create_future()
        self._error: Exception | None = None

    @classmethod
    async def connect(
        cls,
        socket_path: str | Path,
        client_name: str,
        *,
        on_push: OnPush | None = None,
        on_disconnect: OnDisconnect | None = None,
        timeout_s: float = 10.0,
        namespace_digest: str | None = None,
    ) -> "AsyncStoreSession":
        """Connect and say hello.

        Raises:
            StoreUnavailableError: no store there, or it does not answer in time.
            StoreError: the store refuses this client.
        """
        session = cls(on_push=on_push, on_disconnect=None)
        try:
            async with asyncio.timeout(timeout_s):
                session._transport, _ = await session._loop.create_unix_connection(
                    lambda: _Protocol(session._on_data, session._on_end), str(socket_path)
                )
            command = hello(client_name, namespace_digest)
            session.welcome = cast(Welcome, await session.request(command, timeout_s))
        except (OSError, TimeoutError) as error:
            await session.close()
            raise StoreUnavailableError(f"cannot connect to the store: {error}") from error
        except BaseException:
            await session.close()
            raise
        session._on_disconnect = on_disconnect
        return session

    async def __aenter__(self) -> "AsyncStoreSession":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def is_connected(self) -> bool:
        return self._transport is not None and not self._closed.done()

    def submit(self, command: StoreCommand) -> "asyncio.Future[StoreReply]":
        """Send `command` (its `seq` is set here). Never blocks.

        The future gets the reply, `StoreFailure` too; `StoreUnavailableError` when the session ends first.
        """
        future: asyncio.Future[StoreReply] = self._loop.create_future()
        if self._transport is None or self._closed.done() or self._transport.is_closing():
            future.set_exception(disconnected("the session with the store has ended"))
            return future
        self._transport.write(self._matcher.stamp(command, future))
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
        if self._transport is not None and not self._closed.done():
            self._transport.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._closed), 5.0)

    # ---- called by the transport -----------------------------------------------------------------
    def _on_data(self, data: bytes) -> None:
        try:
            for pending, reply in self._matcher.feed(data):
                if pending is None:
                    self._push(cast(Push, reply))
                elif not pending.done():  # cancelled, or given up on
                    pending.set_result(reply)
        except TriptychError as error:
            self._error = error
            if self._transport is not None:
                self._transport.abort()

    def _push(self, push: Push) -> None:
        try:
            if self._on_push is not None:
                self._on_push(push)
        except Exception:  # a fault in the owner's callback must not end the session for everybody
            _log.exception("the callback for a push failed")

    def _on_end(self, error: Exception | None) -> None:
        self._closed.set_result(None)
        cause = self._error or error
        failure = disconnected(f"the session with the store ended: {cause or 'closed'}")
        for future in self._matcher.take_pending():
            if not future.done():
                future.set_exception(failure)
                future.exception()  # whoever waits sees it; who has gone away need not
        if self._on_disconnect is not None:
            self._on_disconnect(cause)


class _Protocol(asyncio.Protocol):
    """Hands the transport's events to the session."""

    def __init__(self, on_data: Callable[[bytes], None], on_end: Callable[[Exception | None], None]) -> None:
        self._on_data = on_data
        self._on_end = on_end
        self._eof = False

    def data_received(self, data: bytes) -> None:
        self._on_data(data)

    def eof_received(self) -> None:
        self._eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(exc or (disconnected("the store closed the session") if self._eof else None))
