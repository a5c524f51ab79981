"""What a connection of two agents goes through: a stream of bytes each way, of one thread, which never blocks
but in `wait`, and that is bounded.

`tcp_channel` is a socket, `redis_channel` a pair of streams in Redis.
"""

from collections.abc import Sequence
from typing import Protocol

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import FabricTransport


class ChannelError(TriptychError):
    """The connection is of no use any more."""


class ChannelClosedError(ChannelError):
    """The peer closed it, or the network broke."""


class PeerAlertError(ChannelClosedError):
    """The peer's TLS ended it, and said why: it does not trust our certificate."""


class PeerSilentError(ChannelError):
    """The peer made no progress in time."""


class FabricChannel(Protocol):
    """One end of a connection. All but `wake` by its own thread."""

    carrier: FabricTransport
    """TCP or REDIS."""
    binding: bytes
    """What both ends know of this connection, and no other connection has; empty: nothing."""

    def try_send(self, parts: Sequence[memoryview]) -> int:
        """Bytes taken, of the parts in order; 0: wait until it is writable. Raises ChannelError."""

    def try_receive(self, into: memoryview) -> int:
        """Bytes read into `into`, which is not empty; 0: wait until it is readable.

        Raises:
            ChannelClosedError: also at the end of the stream.
            ChannelError
        """

    def wait(self, timeout_s: float, *, writable: bool, num_bytes: int = 1) -> bool:
        """Until it is readable, or writable if asked for, or woken. Whether it is readable.

        `num_bytes`: of use when they have all come; it may return for fewer, and false while fewer are there.
        """

    def protect(self, send_key: bytes, receive_key: bytes) -> None:
        """The two have proved who they are, and share these keys from now on.

        Raises:
            ChannelError: it must be protected, and cannot be.
        """

    def wake(self) -> None:
        """End a `wait`. From any thread."""

    def close(self) -> None:
        """May be called twice."""
