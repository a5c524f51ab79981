"""Channel of a connection: a byte stream each way for one thread, which blocks only in `wait`, with a limit.

`tcp_channel` is a socket, `redis_channel` a pair of streams in Redis.
"""

from collections.abc import Sequence
from typing import Protocol

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import FabricTransport


class ChannelError(TriptychError):
    """The connection is unusable and must be closed."""


class ChannelClosedError(ChannelError):
    """The peer closed the connection, or the network broke it."""


class PeerAlertError(ChannelClosedError):
    """The peer's TLS ended the connection because it does not trust our certificate."""


class PeerSilentError(ChannelError):
    """The peer made no progress in time."""


class FabricChannel(Protocol):
    """One end of a connection. Only `wake` may be called from other threads."""

    carrier: FabricTransport
    """Transport that carries the bytes: TCP or REDIS."""
    binding: bytes
    """Value that only the two ends of this connection know; may be empty."""

    def try_send(self, parts: Sequence[memoryview]) -> int:
        """Send `parts` in order; returns the bytes taken, 0 until writable. Raises ChannelError."""

    def try_receive(self, into: memoryview) -> int:
        """Read into `into`, which is not empty; returns the bytes read, 0 until readable.

        Raises:
            ChannelClosedError: also at the end of the stream.
            ChannelError
        """

    def wait(self, timeout_s: float, *, writable: bool, num_bytes: int = 1) -> bool:
        """Wait until readable, writable (if asked for) or woken; True if readable.

        `num_bytes` is a hint: fewer are of no use. It may return earlier, and False while fewer have come.
        """

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """Authenticate later bytes with keys from the completed handshake.

        Raises:
            ChannelError: it must be protected, and cannot be.
        """

    def wake(self) -> None:
        """End a `wait`. Callable from any thread."""

    def close(self) -> None:
        """Close; repeated calls have no effect."""
