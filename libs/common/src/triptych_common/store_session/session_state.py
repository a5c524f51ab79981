"""Requests, replies and pushes of one session, matched across connections. Pure: no socket, no clock.

Shared by the thread-based and the asyncio session, generic in what stands for a pending reply
(`concurrent.futures.Future`, `asyncio.Future`). `resumption` describes how a session survives a restart.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from triptych_common.domain.errors import (
    MalformedMessageError,
    StoreProtocolError,
    StoreUnavailableError,
    store_error,
)
from triptych_common.protocol.codec import FrameDecoder, decode_reply, frame
from triptych_common.protocol.store import (
    STORE_PROTOCOL_VERSION,
    EntrySealed,
    Hello,
    StoreFailure,
    StoreReply,
    Welcome,
    WriterLost,
)
from triptych_common.store_session.resumption import (
    Request,
    WatchLog,
    final_reply,
    is_resumed,
    push_of,
    resume_of,
    to_repeat,
    watch_again,
)

log = logging.getLogger(__name__)

Push = EntrySealed | WriterLost
Pending = TypeVar("Pending")
Value = TypeVar("Value")
Event = tuple[Pending | None, StoreReply]
"""Meaning of a frame: a reply with its pending object, or a push with None."""


class SessionState(Generic[Pending]):
    """Numbers requests, finds the one that a frame answers, and knows what to send again after a break.

    Not thread-safe in itself: `stamp` is called under the owner's send lock, the rest by its one reader.
    """

    def __init__(self, client_name: str, namespace_digest: str | None) -> None:
        self.welcome: Welcome | None = None
        self._client_name = client_name
        self._namespace_digest = namespace_digest
        self._decoder = FrameDecoder()
        self._seqs = itertools.count(1)
        self._requests: dict[int, Request[Pending]] = {}
        self._watches = WatchLog()
        self._broken: list[tuple[int, Request[Pending]]] = []  # of the connection before, in order of sending

    # ---- a connection begins ---------------------------------------------------------------------
    def begin_connection(self) -> bytes:
        """Return the first frame of a connection, which resumes the previous connection's lease."""
        self._decoder = FrameDecoder()
        self._broken = sorted([*self._broken, *self._requests.items()])
        self._requests = {}
        resume = None
        if self.welcome is not None:
            resume = resume_of(self.welcome, dict(self._broken), self._watches.all())
        hello = Hello(
            seq=next(self._seqs),
            version=STORE_PROTOCOL_VERSION,
            client=self._client_name,
            namespace_digest=self._namespace_digest,
            resume=resume,
        )
        return frame(hello)

    def on_welcome(self, data: bytes) -> list[Request[Pending]] | None:
        """Read the store's answer to hello and return the requests to send again; None if it is incomplete.

        Raises:
            StoreError: the store refuses this client.
            StoreUnavailableError: the lease of the connection before is gone; everything it held is lost.
            MalformedMessageError: bytes that are no reply.
        """
        bodies = self._decoder.feed(data)
        if not bodies:
            return None
        reply = decode_reply(bodies[0])
        if isinstance(reply, StoreFailure):
            raise store_error(reply)
        if not isinstance(reply, Welcome) or len(bodies) > 1:
            raise StoreProtocolError("bad_frame", f"{reply.kind!r} is no answer to hello")
        if self.welcome is not None and not is_resumed(self.welcome, reply):
            raise StoreUnavailableError("the store has lost what this session held", code="lease_lost")
        self.welcome = reply
        watches: list[Request[Pending]] = [
            watch_again(mm_hash, each) for mm_hash, each in self._watches.take_all().items()
        ]
        repeats = [to_repeat(request, seq <= reply.last_seq) for seq, request in self._broken]
        self._broken = []
        return [*repeats, *watches]

    # ---- while it lasts --------------------------------------------------------------------------
    def frame_request(self, request: Request[Pending]) -> bytes:
        """Return `request` as a frame with a `seq` of its own.

        Raises:
            MalformedMessageError: the frame would be too large.
        """
        seq = next(self._seqs)
        data = frame(request.command, seq)
        self._requests[seq] = request
        self._watches.note_sent(request.command, seq)
        return data

    def on_data(self, data: bytes) -> Iterator[Event[Pending]]:
        """Yield the meaning of each frame that `data` completes, in the order sent.

        Raises:
            ProtocolError: bytes that are no reply. The session cannot go on.
            StoreProtocolError: a reply without a request, or the store refused a frame of ours.
        """
        for body in self._decoder.feed(data):
            reply = decode_reply(body)
            if reply.seq:
                event = self._answered(reply)
                if event is not None:
                    yield event
            elif isinstance(reply, Push):
                self._watches.note_push(reply)
                yield None, reply
            elif isinstance(reply, StoreFailure):
                raise StoreProtocolError(reply.code, reply.detail)
            else:
                raise MalformedMessageError(f"{reply.TYPE} is no push")

    def take_pending(self) -> list[Pending]:
        """Return and clear pending objects that get no answer. Call it again after a late `frame_request`."""
        requests = [request for _, request in self._broken]
        self._broken = []
        while self._requests:
            requests.append(self._requests.popitem()[1])
        return [request.pending for request in requests if request.pending is not None]

    @property
    def num_pending(self) -> int:
        return len(self._requests) + len(self._broken)

    def _answered(self, reply: StoreReply) -> Event[Pending] | None:
        request = self._requests.pop(reply.seq, None)
        if request is None:
            raise StoreProtocolError("bad_frame", f"seq {reply.seq} was not asked for")
        self._watches.note_answer(request.command, reply)
        if request.pending is not None:
            return request.pending, final_reply(request, reply)
        push = push_of(request.command, reply)
        return None if push is None else (None, push)


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a session; both kinds of session describe the callbacks."""

    on_push: Callable[[Push], None] | None = None
    on_disconnect: Callable[[Exception | None], None] | None = None
    on_reconnect: Callable[[Welcome], None] | None = None
    on_outage: Callable[[Exception], None] | None = None
    timeout_s: float = 10.0  # to connect and be welcomed
    reconnect_timeout_s: float = 0.0  # break that is bridged; 0: the session ends with its connection
    namespace_digest: str | None = None


def call_owner(callback: Callable[[Value], None] | None, value: Value) -> None:
    """Call the session's owner; a fault of its callback must not end the session for all."""
    try:
        if callback is not None:
            callback(value)
    except Exception:
        log.exception("store session callback failed")


def disconnected(detail: str) -> StoreUnavailableError:
    return StoreUnavailableError(detail)
