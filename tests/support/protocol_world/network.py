"""The ways between the actors: streams and HTTP connections, each a queue of its own per sender.

A stream keeps its entries while its reader is down. What two senders sent to one reader has no order.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import BUS_MESSAGES, Message
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.steps import STEPS, Channel, Party
from triptych_common.protocol.store import Ping

NAMES = StreamNames("model")
GATEWAY, STORE = "gateway-0", "store-0"
Way = tuple[str, str, str]  # (sender, receiver, stream or "http")


@dataclass
class JobEntry:
    """One entry of `encode-jobs`. `owner`: the encoder it was delivered to last."""

    number: int
    message: Message
    published_at: float
    remaining_ms: int | None
    blob: bytes | None
    owner: str | None = None
    num_deliveries: int = 0

    def envelope(self, now: float) -> Envelope:
        return Envelope(
            self.message,
            remaining_ms=self.remaining_ms,
            blob=self.blob,
            received_at=now,
            queued_s=now - self.published_at,
        )


@dataclass
class Network:
    """`now` is the model's time. Owns what is under way between processes, but for the store's socket."""

    now: Callable[[], float]
    queues: dict[Way, deque[Any]] = field(default_factory=dict)
    jobs: dict[int, JobEntry] = field(default_factory=dict)
    num_jobs: int = 0
    keys: dict[str, bytes] = field(default_factory=dict)
    num_dead_letters: int = 0

    def send(self, way: Way, message: Any) -> None:
        self.queues.setdefault(way, deque()).append(message)

    def take(self, way: Way) -> Any:
        queue = self.queues[way]
        message = queue.popleft()
        if not queue:
            del self.queues[way]
        return message

    def peek(self, way: Way) -> Any:
        return self.queues[way][0]

    def drop(self, way: Way) -> list[Any]:
        """A connection ends: what was under way on it."""
        return list(self.queues.pop(way, ()))

    def ways_to(self, receiver: str) -> list[Way]:
        return sorted(way for way in self.queues if way[1] == receiver)

    def publish(
        self, sender: str, stream: str, message: Message, remaining_ms: int | None, blob: Any
    ) -> None:
        assert type(message) in BUS_MESSAGES
        if stream == NAMES.encode_jobs:
            self.num_jobs += 1
            entry = JobEntry(self.num_jobs, message, self.now(), remaining_ms, blob)
            self.jobs[self.num_jobs] = entry
            return
        kind, receiver = stream.rsplit(":", 2)[-2:]
        self.send((sender, receiver, kind), message)


class AsyncBusModel:
    """`AsyncBus` of one process, and the keys of Redis."""

    def __init__(self, network: Network, sender: str) -> None:
        self.network: Network | None = network
        self._sender = sender
        self.names = NAMES

    async def publish(
        self,
        stream: str,
        message: Message,
        *,
        traceparent: str | None = None,
        remaining_ms: int | None = None,
        blob: bytes | None = None,
    ) -> None:
        if self.network is not None:
            self.network.publish(self._sender, stream, message, remaining_ms, blob)

    async def stream_length(self, stream: str) -> int:
        return 0 if self.network is None else len(self.network.jobs)

    async def sizes_get(self, mm_hash: str) -> bytes | None:
        return None if self.network is None else self.network.keys.get(mm_hash)

    async def sizes_set(self, mm_hash: str, value: bytes, ttl_s: int) -> None:
        if self.network is not None:
            self.network.keys[mm_hash] = value


class ThreadedBusModel:
    """`ThreadedBus` of one process."""

    def __init__(self, network: Network, sender: str) -> None:
        self._network = network
        self._sender = sender

    def publish(self, stream: str, message: Message, *, traceparent: str | None = None) -> None:
        self._network.publish(self._sender, stream, message, None, None)


def party(name: str) -> Party:
    """Of an instance or a store's client."""
    instance, _, part = name.partition("/")
    match instance.rsplit("-", 1)[0], part.startswith("worker"):
        case "encoder", is_worker:
            return Party.ENCODER_WORKER if is_worker else Party.ENCODER
        case "pd", is_worker:
            return Party.PREFILL_DECODE_WORKER if is_worker else Party.PREFILL_DECODE
        case "gateway", _:
            return Party.GATEWAY
    return Party.CACHE_STORE


_BY_KEY = {
    (each.channel, each.sender, each.receiver, each.message, each.variant): each.name for each in STEPS
}


def step_of(channel: Channel, sender: str, receiver: str, message: Message) -> str:
    """The name of the protocol's step that this message is.

    Raises:
        KeyError: there is no such step.
    """
    if isinstance(message, Ping):
        return "ping"  # of a session that resumes, in place of a command that needs no answer any more
    variant = getattr(message, "decision", None) or getattr(message, "outcome", None)
    return _BY_KEY[channel, party(sender), party(receiver), type(message), variant]
