"""One session's requests, replies and pushes, matched. Pure: bytes in, events out, no socket.

Shared by the thread-based and the asyncio session, generic in what stands for a pending reply
(`concurrent.futures.Future`, `asyncio.Future`).
"""

import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from triptych_common.domain.errors import StoreProtocolError, StoreUnavailableError
from triptych_common.protocol.codec import FrameDecoder, decode_reply, frame
from triptych_common.protocol.store import (
    STORE_PROTOCOL_VERSION,
    EntrySealed,
    Hello,
    StoreCommand,
    StoreFailure,
    StoreReply,
    WriterLost,
)

Push = EntrySealed | WriterLost
Pending = TypeVar("Pending")


class SessionMatcher(Generic[Pending]):
    """Numbers commands and finds the pending reply that a frame answers.

    `stamp` may be called from any thread and from a finalizer: it takes no lock. `feed` is for one
    reader at a time.
    """

    def __init__(self) -> None:
        self._decoder = FrameDecoder()
        self._seqs = itertools.count(1)
        self._pending: dict[int, Pending] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def stamp(self, command: StoreCommand, pending: Pending) -> bytes:
        """`command` as a frame with a `seq` of its own; `pending` comes back with its reply.

        Raises:
            MalformedMessageError: the frame would be too large.
        """
        seq = next(self._seqs)
        data = frame(command.model_copy(update={"seq": seq}))
        self._pending[seq] = pending
        return data

    def feed(self, data: bytes) -> Iterator[tuple[Pending | None, StoreReply]]:
        """Replies with what was pending for them, and pushes with None, in the order they were sent.

        Raises:
            ProtocolError: bytes that are no reply. The session cannot go on.
            StoreProtocolError: a reply that nobody asked for, or the store refused a frame of ours.
        """
        for body in self._decoder.feed(data):
            reply = decode_reply(body)
            if reply.seq:
                if reply.seq not in self._pending:
                    raise StoreProtocolError("bad_frame", f"seq {reply.seq} was not asked for")
                yield self._pending.pop(reply.seq), reply
            elif isinstance(reply, Push):
                yield None, reply
            elif isinstance(reply, StoreFailure):
                raise StoreProtocolError(reply.code, reply.detail)
            else:
                raise StoreProtocolError("bad_frame", f"{reply.TYPE} is no push")

    def take_pending(self) -> list[Pending]:
        """Everything that will not be answered any more."""
        pending, self._pending = self._pending, {}
        return list(pending.values())


def hello(client_name: str, namespace_digest: str | None) -> Hello:
    """The first command of every session."""
    return Hello(seq=0, version=STORE_PROTOCOL_VERSION, client=client_name, namespace_digest=namespace_digest)


def disconnected(detail: str) -> StoreUnavailableError:
    """What requests fail with when the session has ended."""
    return StoreUnavailableError(detail)
