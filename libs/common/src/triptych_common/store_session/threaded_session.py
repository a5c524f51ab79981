"""StoreSession: the store's client for code without an event loop, e.g. inside vLLM's processes.

One thread reads, and connects again when the store restarts. Any thread submits, finalizers included:
`submit` takes no lock that a finalizer on the same thread could already hold. Requests wait in a deque;
the thread that gets the send lock sends them all, others leave them to its holder, which checks again
after releasing it.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import cast

from triptych_common.domain.errors import StoreUnavailableError, TriptychError, store_error
from triptych_common.protocol.store import StoreCommand, StoreFailure, StoreReply, Welcome
from triptych_common.region.slot_lock import SlotLock
from triptych_common.store_session.dial import FIRST_RETRY_S, LAST_RETRY_S, dial
from triptych_common.store_session.resumption import Request
from triptych_common.store_session.session_state import (
    Push,
    SessionOptions,
    SessionState,
    call_owner,
    disconnected,
)

READ_BYTES = 1 << 16
MAX_UNSENT_REQUESTS = 100_000

OnPush = Callable[[Push], None]
OnDisconnect = Callable[[Exception | None], None]
OnReconnect = Callable[[Welcome], None]
OnOutage = Callable[[Exception], None]
_Request = Request[Future[StoreReply]]


class StoreSession:
    """A session with the store. `welcome` has the region's place; a reconnect renews it.

    `on_push`, `on_reconnect`, `on_outage` and the callbacks of futures run in the reader thread: they must
    not block, and must not wait for another reply. `on_disconnect` runs there once, at the session's end,
    with None after `close`. With `reconnect_timeout_s` a break of that length is bridged: pins and
    reservations stay, requests wait, and `on_reconnect` is called after it. `on_outage` is called before, if
    the store does not take a new connection at once: it has crashed or been stopped.
    """

    def __init__(self, socket_path: str | Path, client_name: str, options: SessionOptions) -> None:
        self._path = str(socket_path)
        self._options = options
        self._state: SessionState[Future[StoreReply]] = SessionState(client_name, options.namespace_digest)
        self._unsent: deque[_Request] = deque()
        self._partial = b""  # rest of a frame that the socket did not take
        self._send_lock = threading.Lock()
        self._is_up = True  # False while the reader connects again
        self._closing = False
        self._ended = False
        self._socket, _ = dial(self._path, self._state, options.timeout_s)
        try:
            self._lock = SlotLock(self.welcome.region_path, self.welcome.client_slot)
            self._wake_sender, self._wake_receiver = socket.socketpair()
        except BaseException:
            self._socket.close()
            raise
        self._wake_sender.setblocking(False)
        self._wake_receiver.setblocking(False)
        self._thread = threading.Thread(target=self._read_loop, name="store-session", daemon=True)
        self._thread.start()

    @classmethod
    def connect(
        cls,
        socket_path: str | Path,
        client_name: str,
        *,
        on_push: OnPush | None = None,
        on_disconnect: OnDisconnect | None = None,
        on_reconnect: OnReconnect | None = None,
        on_outage: OnOutage | None = None,
        timeout_s: float = 10.0,
        reconnect_timeout_s: float = 0.0,
        namespace_digest: str | None = None,
    ) -> "StoreSession":
        """Connect and send hello.

        Raises:
            StoreUnavailableError: no store there, or it does not answer in time.
            StoreError: the store refuses this client.
        """
        options = SessionOptions(
            on_push, on_disconnect, on_reconnect, on_outage, timeout_s, reconnect_timeout_s, namespace_digest
        )
        return cls(socket_path, client_name, options)

    @property
    def welcome(self) -> Welcome:
        """The store's last answer to hello."""
        return cast(Welcome, self._state.welcome)

    @property
    def is_connected(self) -> bool:
        """True while the session is up: not over, and the store not away."""
        return self._is_up and not self._ended

    @property
    def has_ended(self) -> bool:
        return self._ended

    def submit(self, command: StoreCommand) -> "Future[StoreReply]":
        """Send `command` (its `seq` is set here). Never blocks.

        The future gets the reply, which may be a `StoreFailure`; it gets `StoreUnavailableError` if the
        session ends first.
        """
        future: Future[StoreReply] = Future()
        future.set_running_or_notify_cancel()  # a submitted command cannot be taken back
        if self._closing or self._ended:
            future.set_exception(disconnected("the session with the store has ended"))
            return future
        if len(self._unsent) >= MAX_UNSENT_REQUESTS:
            future.set_exception(disconnected("the store does not read its commands"))
            return future
        self._unsent.append(Request(command, future))
        self._send_all()
        if self._is_over():  # meanwhile, perhaps after its pending futures were failed
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
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _is_over(self) -> bool:
        return self._ended

    # ---- sending ---------------------------------------------------------------------------------
    def _send_all(self) -> None:
        while self._unsent and self._is_up and not self._partial and self._send_lock.acquire(blocking=False):
            try:
                self._send_queued()
            finally:
                self._send_lock.release()

    def _send_queued(self) -> None:
        """Send until the queue is empty or the socket is full; the reader sees a broken socket too."""
        while self._is_up and (self._partial or self._unsent):
            data = self._partial or self._stamp_next()
            try:
                num_sent = self._socket.send(data) if data else 0
            except BlockingIOError:
                num_sent = 0
            except OSError:
                self._partial = data
                return
            self._partial = data[num_sent:]
            if self._partial:
                self._wake()  # the reader waits until the socket takes more
                return

    def _stamp_next(self) -> bytes:
        request = self._unsent.popleft()
        try:
            return self._state.frame_request(request)
        except TriptychError as error:  # too large for a frame
            if request.pending is not None:
                request.pending.set_exception(error)
            return b""

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # woken already, or the reader has ended and closed it
            self._wake_sender.send(b"w")

    # ---- the reader thread -----------------------------------------------------------------------
    def _read_loop(self) -> None:
        error: Exception | None = None
        try:
            while error is None and not self._closing:
                error = self._read_until_broken()
                if (
                    error is not None
                    and self._options.reconnect_timeout_s > 0
                    and isinstance(error, StoreUnavailableError)
                ):
                    error = self._try_reconnect(error)
        finally:
            self._end(error)

    def _read_until_broken(self) -> Exception | None:
        """Read until the connection breaks; return the cause, or None after `close`."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                while not self._closing:
                    self._wait_and_act(selector)
        except OSError as error:
            return disconnected(f"the connection to the store broke: {error}")
        except TriptychError as error:
            return error
        return None

    def _wait_and_act(self, selector: selectors.BaseSelector) -> None:
        wants_write = selectors.EVENT_WRITE if self._partial else 0
        selector.modify(self._socket, selectors.EVENT_READ | wants_write)
        for key, events in selector.select():  # woken by the socket, `close` and `_send_queued`
            if key.fileobj is not self._socket:
                self._wake_receiver.recv(READ_BYTES)
                continue
            if events & selectors.EVENT_WRITE:
                with self._send_lock:
                    self._send_queued()
                self._send_all()
            if events & selectors.EVENT_READ:
                self._receive()

    def _receive(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise disconnected("the store closed the session")
        for pending, reply in self._state.on_data(data):
            if pending is None:
                call_owner(self._options.on_push, cast(Push, reply))
            else:
                pending.set_result(reply)

    def _try_reconnect(self, cause: Exception) -> Exception | None:
        """Bridge the break; return None if the lease is resumed, else why the session is over."""
        self._is_up = False
        deadline, retry_s, error = time.monotonic() + self._options.reconnect_timeout_s, FIRST_RETRY_S, cause
        is_outage = False
        with self._send_lock:
            self._socket.close()
            self._partial = b""
        while not self._closing and time.monotonic() < deadline:
            try:
                self._socket, repeats = dial(self._path, self._state, self._options.timeout_s)
            except StoreUnavailableError as unavailable:
                if unavailable.code == "lease_lost":
                    return unavailable
                error = unavailable
                if not is_outage:
                    is_outage = True
                    call_owner(self._options.on_outage, error)
            except TriptychError as refused:
                return refused
            else:
                self._unsent.extendleft(reversed(repeats))
                self._is_up = True
                call_owner(self._options.on_reconnect, self.welcome)
                self._send_all()
                return None
            self._pause(retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
        return None if self._closing else error

    def _pause(self, timeout_s: float) -> None:
        """Wait before the next attempt, unless `close` wakes the thread."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_receiver, selectors.EVENT_READ)
            if selector.select(timeout_s):
                self._wake_receiver.recv(READ_BYTES)

    def _end(self, error: Exception | None) -> None:
        self._ended = True
        self._lock.close()
        self._socket.close()
        self._wake_sender.close()
        self._wake_receiver.close()
        self._fail_pending(error or disconnected("the session with the store was closed"))
        call_owner(self._options.on_disconnect, error)

    def _fail_pending(self, error: Exception) -> None:
        """Fail pending futures without the send lock, which a finalizer's caller may hold."""
        pending = self._state.take_pending()
        with contextlib.suppress(IndexError):
            while True:
                request = self._unsent.popleft()
                if request.pending is not None:
                    pending.append(request.pending)
        for future in pending:
            with contextlib.suppress(InvalidStateError):
                future.set_exception(error)
