"""Channel of a connection: a socket, plain or TLS, for one thread."""

import contextlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Sequence

from triptych_common.domain.errors import TriptychError

_WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError, InterruptedError)
_ENDED = select.POLLERR | select.POLLHUP | select.POLLNVAL


class ChannelError(TriptychError):
    """The connection is unusable and must be closed."""


class ChannelClosedError(ChannelError):
    """The peer closed the connection, or the network broke it."""


class PeerAlertError(ChannelClosedError):
    """The peer's TLS ended the connection because it does not trust our certificate."""


class PeerSilentError(ChannelError):
    """The peer made no progress in time."""


class FabricChannel:
    """Channel over a connected socket, plain or TLS, which it takes over and closes; only `wait` blocks.

    It belongs to one thread; `wake` may be called from any.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(sock, select.POLLIN)
        self._fd = sock.fileno()
        self._wants = select.POLLIN
        self._num_wanted = 1  # Linux's default
        self._is_closed = False
        self._close_lock = threading.Lock()  # so that no `wake` writes to a file that came after ours

    def start_tls(self, context: ssl.SSLContext, *, server_side: bool) -> ssl.SSLSocket:
        """Wrap the connection in TLS; `try_handshake` performs the handshake."""
        wrapped = context.wrap_socket(self._sock, server_side=server_side, do_handshake_on_connect=False)
        self._sock = wrapped
        return wrapped

    def try_handshake(self) -> bool:
        """One step of the TLS handshake; False until complete: wait, then call again.

        Raises:
            ssl.SSLError: the peer has no certificate that we trust, or does not trust ours, or speaks no TLS.
            ChannelClosedError
        """
        if not isinstance(self._sock, ssl.SSLSocket):
            return True
        try:
            self._sock.do_handshake()
        except _WOULD_BLOCK:
            return False
        except ssl.SSLError:
            raise
        except OSError as error:
            raise _closed(error) from error
        return True

    def try_send(self, parts: Sequence[memoryview]) -> int:
        """Send `parts` in order; returns the bytes taken, 0 until writable. TLS takes one part at a time.

        Raises:
            ChannelClosedError
        """
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                return self._sock.send(parts[0])
            return self._sock.sendmsg(parts)
        except _WOULD_BLOCK:
            return 0
        except OSError as error:
            raise _closed(error) from error

    def try_receive(self, into: memoryview) -> int:
        """Read into `into`, which is not empty; returns the bytes read, 0 until readable.

        Raises:
            PeerAlertError
            ChannelClosedError: also at the end of the stream.
        """
        try:
            num_bytes = self._sock.recv_into(into)
        except _WOULD_BLOCK:
            return 0
        except ssl.SSLError as error:
            if "ALERT" in (error.reason or ""):
                raise PeerAlertError(f"the peer ended TLS: {error.reason}") from error
            raise _closed(error) from error
        except OSError as error:
            raise _closed(error) from error
        if num_bytes == 0:
            raise ChannelClosedError("the peer closed the connection")
        return num_bytes

    def wait(self, timeout_s: float, *, writable: bool, num_bytes: int = 1) -> bool:
        """Wait until readable, writable (if asked for) or woken; True if readable.

        `num_bytes` is a hint: fewer are of no use. It may return earlier, and False while fewer have come.
        """
        self._want_bytes(num_bytes)
        wants = select.POLLIN | (select.POLLOUT if writable else 0)
        if wants != self._wants:
            self._poll.modify(self._fd, wants)
            self._wants = wants
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            timeout_s = 0.0
        readable = False
        for fd, events in self._poll.poll(max(0, int(timeout_s * 1000 + 0.999))):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            else:
                readable = bool(events & (select.POLLIN | _ENDED))
        return readable or (isinstance(self._sock, ssl.SSLSocket) and self._sock.pending() > 0)

    def _want_bytes(self, num_bytes: int) -> None:
        """Set SO_RCVLOWAT; not for TLS, where plaintext and wire sizes differ."""
        if num_bytes == self._num_wanted or isinstance(self._sock, ssl.SSLSocket):
            return
        self._num_wanted = num_bytes
        with contextlib.suppress(OSError):  # kernels without it: a `wait` ends for fewer bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)

    def wake(self) -> None:
        """End a `wait`. Callable from any thread."""
        with self._close_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close, in the connection's own thread; repeated calls have no effect."""
        with self._close_lock:
            if not self._is_closed:
                self._is_closed = True
                self._sock.close()
                os.close(self._wake)


def _closed(error: OSError) -> ChannelClosedError:
    return ChannelClosedError(f"the connection broke: {error.strerror or error}")
