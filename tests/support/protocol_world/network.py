"""The ways between the actors: streams and HTTP connections, each a queue of its own per sender.

A stream keeps its entries while its reader is down. What two senders sent to one reader has no order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.flight_model import FlightModel
from tests.support.protocol_steps import STEPS, Channel, Party
from triptych_common.bus.publisher import NewEntry, RefusedEntry
from triptych_common.protocol import codec
from triptych_common.protocol.codec import BUS_MESSAGES, Envelope
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeJob, Message
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.store import Cancel, Lookup, Ping, Reserve, Seal
from triptych_common.protocol.transfers import EntryPlace, TransferOrder

NAMES = StreamNames("model")
DIGEST = "d" * 64  # of the one namespace
STORE = "store-0"
Way = tuple[str, str, str]  # (sender, receiver, stream or "http")


@dataclass
class JobEntry:
    """One entry of the jobs' stream. `owner`: the encoder it was delivered to last."""

    number: int
    message: EncodeJob
    stream: str
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


class Network:
    """`now` is the model's time. Owns what is under way between processes, but for the store's socket.

    And what Redis keeps: the jobs (it is their stream, `flight_model.Jobs`), the flights, the sizes, the
    directory of entries.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.queues: dict[Way, deque[Any]] = {}
        self.jobs: dict[int, JobEntry] = {}
        self.num_jobs = 0
        self.keys: dict[str, bytes] = {}
        self.places: dict[MmHash, tuple[EntryPlace, ...]] = {}  # the directory of entries
        self.order_ends: dict[str, float] = {}  # deadlines of transfer orders
        self.flights = FlightModel(self, now)

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

    # ---- the stream of jobs ----------------------------------------------------------------------
    def append(self, job: EncodeJob, stream: str, *, remaining_ms: int | None, blob: bytes | None) -> str:
        self.num_jobs += 1
        self.jobs[self.num_jobs] = JobEntry(self.num_jobs, job, stream, self.now(), remaining_ms, blob)
        return str(self.num_jobs)

    def has(self, entry_id: str) -> bool:
        return int(entry_id) in self.jobs

    is_awaited = has  # what stands here is new, or was delivered and not acked

    def remove(self, entry_id: str) -> None:
        self.jobs.pop(int(entry_id), None)

    def num_entries(self, stream: str) -> int:
        return sum(each.stream == stream for each in self.jobs.values())

    def lose_redis(self) -> None:
        """It comes back empty. What is on its way to it is sent again."""
        for way in [way for way in self.queues if way[2] != "http"]:
            del self.queues[way]
        self.jobs.clear()
        self.keys.clear()
        self.places.clear()
        self.flights.flights.clear()

    def publish(self, sender: str, stream: str, message: Message, remaining_ms: int | None = None) -> None:
        assert type(message) in BUS_MESSAGES
        if isinstance(message, TransferOrder):
            assert remaining_ms is not None, "a transfer without an end"
            self.order_ends[message.transfer_id] = self.now() + remaining_ms / 1000
        kind, receiver = stream.rsplit(":", 2)[-2:]
        self.send((sender, receiver, kind), message)


class SizesModel:
    """`SharedSizes` of one process."""

    def __init__(self, bus: "AsyncBusModel") -> None:
        self._bus = bus

    async def get(self, mm_hash: str) -> bytes | None:
        return None if self._bus.network is None else self._bus.network.keys.get(mm_hash)

    async def set(self, mm_hash: str, value: bytes) -> bool:
        if self._bus.network is not None:
            self._bus.network.keys[mm_hash] = value
        return True


class AsyncBusModel:
    """`AsyncBus` of one process."""

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
            self.network.publish(self._sender, stream, message, remaining_ms)

    async def publish_encoded(self, entries: Sequence[NewEntry]) -> list[RefusedEntry]:
        for stream, fields in entries:
            message = codec.decode(fields).message
            if self.network is not None:
                self.network.publish(self._sender, stream, message)
        return []


class ThreadedBusModel:
    """`ThreadedBus` of one process."""

    def __init__(self, network: Network, sender: str) -> None:
        self._network = network
        self._sender = sender

    def publish(self, stream: str, message: Message, *, traceparent: str | None = None) -> None:
        self._network.publish(self._sender, stream, message)


def party(name: str, message: Message) -> Party:
    """Of an instance or a store's client, that sends or gets this."""
    instance, _, part = name.partition("/")
    match instance.rsplit("-", 1)[0], part.startswith("worker"):
        case "encoder", is_worker:
            return Party.ENCODER_WORKER if is_worker else Party.ENCODER
        case "pd" | "p", is_worker:  # in messages an instance that prefills is a prefill_decode
            return Party.PREFILL_DECODE_WORKER if is_worker else Party.PREFILL_DECODE
        case "gateway", _:
            return Party.GATEWAY
        case "agent", _:
            is_target = isinstance(message, Reserve | Seal | Cancel)
            return Party.TARGET_AGENT if is_target else Party.SOURCE_AGENT
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
    if isinstance(message, Lookup):
        return "lookup"
    variant = getattr(message, "decision", None) or getattr(message, "outcome", None)
    return _BY_KEY[channel, party(sender, message), party(receiver, message), type(message), variant]
