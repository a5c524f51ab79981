"""StoreSession: the store's client for code without an event loop, e.g. inside vLLM's processes.

One thread reads. Any thread submits, finalizers included: `submit` takes no lock that a finalizer on
the same thread could already hold. Commands wait in a deque; whoever gets the send lock sends them all,
whoever does not leaves them to its holder, who looks again after letting go.
"""

import contextlib
import logging
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import cast

from triptych_common.domain.errors import StoreUnavailableError, TriptychError, store_error
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreReply, Welcome
from triptych_common.region.session import Push, SessionMatcher, disconnected, hello

READ_BYTES = 1 << 16
MAX_UNSENT_FRAMES = 100_000

_log = logging.getLogger(__name__)

OnPush = Callable[[Push], None]
OnDisconnect = Callable[[Exception | None], None]


class StoreSession:
    """A session with the store. `welcome` says where the region is.

    `on_push` and the callbacks of futures run in the reader thread: they must not block, and must not
    wait for another reply. `on_disconnect` is called once there, with None after `close`.
    """

    def __init__(
        self, sock: socket.socket, *, on_push: OnPush | None, on_disconnect: OnDisconnect | None
    ) -> None:
        self.welcome: Welcome  # set by `connect`
        self._socket = sock
        self._on_push = on_push
        self._on_disconnect = on_disconnect
        self._matcher: SessionMatcher[Future[StoreReply]] = SessionMatcher()
        self._unsent: deque[bytes] = deque()
        self._send_lock = threading.Lock()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._wants_write = False
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._read_loop, name="store-session", daemon=True)

    @classmethod
    def connect(
        cls,
        socket_path: str | Path,
        client_name: str,
        *,
        on_push: OnPush | None = None,
        on_disconnect: OnDisconnect | None = None,
        timeout_s: float = 10.0,
        namespace_digest: str | None = None,
    ) -> "StoreSession":
        """Connect and say hello.

        Raises:
            StoreUnavailableError: no store there, or it does not answer in time.
            StoreError: the store refuses this client.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(socket_path))
            sock.setblocking(False)
        except OSError as error:
            sock.close()
            raise StoreUnavailableError(f"cannot connect to the store: {error}") from error
        session = cls(sock, on_push=on_push, on_disconnect=None)
        session._thread.start()
        try:
            session.welcome = cast(Welcome, session.request(hello(client_name, namespace_digest), timeout_s))
        except BaseException:
            session.close()
            raise
        session._on_disconnect = on_disconnect
        return session

    @property
    def is_connected(self) -> bool:
        return not self._ended

    def submit(self, command: StoreCommand) -> "Future[StoreReply]":
        """Send `command` (its `seq` is set here). Never blocks.

        The future gets the reply, `StoreFailure` too; `StoreUnavailableError` when the session ends first.
        """
        future: Future[StoreReply] = Future()
        future.set_running_or_notify_cancel()  # a submitted command cannot be taken back
        if self._closing or not self.is_connected:
            future.set_exception(disconnected("the session with the store has ended"))
            return future
        if len(self._unsent) >= MAX_UNSENT_FRAMES:
            future.set_exception(disconnected("the store does not read its commands"))
            return future
        self._unsent.append(self._matcher.stamp(command, future))
        if not self._wants_write:
            self._send_all()
        if self._ended:  # ended meanwhile, perhaps after its pending futures were failed
            self._fail_pending(disconnected("the session with the store has ended"))
        return future

    def request(self, command: StoreCommand, timeout_s: float = 10.0) -> StoreReply:
        """Send `command` and wait for its reply. Not from the reader thread.

        Raises:
            StoreUnavailableError: the session ended, or no reply in time (the command may still take effect).
            StoreError: the store refused; the class follows the code.
        """
        try:
            reply = self.submit(command).result(timeout_s)
        except FutureTimeoutError:
            raise StoreUnavailableError(f"no answer in {timeout_s} s", code="timeout") from None
        if isinstance(reply, StoreFailure):
            raise store_error(reply)
        return reply

    def close(self) -> None:
        """End the session: the store gives back everything it held. May be called twice, from any thread."""
        self._closing = True
        if self._thread is threading.current_thread():
            return
        if not self._thread.is_alive():
            return
        self._wake()
        self._thread.join(timeout=5.0)

    # ---- sending ---------------------------------------------------------------------------------
    def _send_all(self) -> None:
        while self._unsent and self._send_lock.acquire(blocking=False):
            try:
                done = self._send_queued()
            finally:
                self._send_lock.release()
            if not done:
                return

    def _send_queued(self) -> bool:
        """Send until the queue is empty (True) or the socket takes no more or has failed (False)."""
        while self._unsent:
            data = self._unsent[0]
            try:
                num_sent = self._socket.send(data)
            except BlockingIOError:
                num_sent = 0
            except OSError:
                self._unsent.clear()  # the reader sees the end of the session
                return False
            if num_sent == len(data):
                self._unsent.popleft()
                continue
            self._unsent[0] = data[num_sent:]
            self._wants_write = True
            self._wake()
            return False
        return True

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # woken already, or the reader has ended and closed it
            self._wake_sender.send(b"w")

    # ---- the reader thread -----------------------------------------------------------------------
    def _read_loop(self) -> None:
        error: Exception | None = None
        try:
            self._read_until_closed()
        except (OSError, TriptychError) as caught:
            error = caught
        finally:
            self._end(error)

    def _read_until_closed(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            while not self._closing:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._wants_write else 0)
                selector.modify(self._socket, wanted)
                for key, events in selector.select():  # woken by the socket, `close` and `_send_queued`
                    if key.fileobj is not self._socket:
                        self._wake_receiver.recv(READ_BYTES)
                        continue
                    if events & selectors.EVENT_WRITE:
                        self._wants_write = False
                        self._send_all()
                    if events & selectors.EVENT_READ:
                        self._receive()

    def _receive(self) -> None:
        data = self._socket.recv(READ_BYTES)
        if not data:
            raise disconnected("the store closed the session")
        for pending, reply in self._matcher.feed(data):
            if pending is not None:
                pending.set_result(reply)
            else:
                self._push(cast(Push, reply))

    def _push(self, push: Push) -> None:
        try:
            if self._on_push is not None:
                self._on_push(push)
        except Exception:  # a fault in the owner's callback must not end the session for everybody
            _log.exception("the callback for a push failed")

    def _end(self, error: Exception | None) -> None:
        self._ended = True
        self._socket.close()
        self._wake_sender.close()
        self._wake_receiver.close()
        self._fail_pending(error or disconnected("the session with the store was closed"))
        if self._on_disconnect is not None:
            self._on_disconnect(error)

    def _fail_pending(self, error: Exception) -> None:
        if not isinstance(error, TriptychError):
            error = disconnected(f"the session with the store ended: {error}")
        for future in self._matcher.take_pending():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
