"""Opens the consumer with its links to store and bus. Without vLLM."""

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from triptych_common.bus import ThreadedBus
from triptych_common.coordination import BlobStore
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncoderCacheMetadata, Message
from triptych_common.protocol.names import OWNER_GROUP, StreamNames
from triptych_common.protocol.store import Descriptor, EntrySealed, StoreReply, WriterLost
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, ConnectorConfig, engine_session_name
from triptych_vllm_connector.consumer.consumer import BusChanged, Consumer, Inbox, PinReply, StoreLost
from triptych_vllm_connector.consumer.local_encode import encodes_no_request
from triptych_vllm_connector.consumer.ports import EncoderCache
from triptych_vllm_connector.consumer.preallocator import make_preallocator
from triptych_vllm_connector.links.readable_pins import ReadablePins, StorePins
from triptych_vllm_connector.readable import Readable
from triptych_vllm_connector.slab_probe import UsableSlab

log = get_logger(__name__)


class BusMessageSender:
    """`MessageSender` over a `ThreadedBus`, whose thread publishes queued messages."""

    def __init__(self, bus: ThreadedBus, names: StreamNames) -> None:
        self._bus = bus
        self._names = names

    def send_to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None:
        stream = (
            self._names.acks(encoder) if message.TYPE == "ItemAck" else self._names.preallocations(encoder)
        )
        self._bus.publish(stream, message, traceparent=traceparent)

    def send_to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None:
        self._bus.publish(self._names.encode_results(gateway), message, traceparent=traceparent)


class Alarm:
    """Timer thread that wakes the engine's thread, which blocks on its input without a timeout.

    The earliest time that was set counts; after a call nothing is set.
    """

    def __init__(self, on_time: Callable[[], None]) -> None:
        """`on_time` is called on the alarm's thread, possibly for a time that no longer matters."""
        self._on_time = on_time
        self._changed = threading.Condition()
        self._when: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="triptych-alarm", daemon=True)
        self._thread.start()

    def set(self, when: float) -> None:
        """Call `on_time` at `when` (monotonic seconds), unless an earlier time is set."""
        with self._changed:
            if self._when is None or when < self._when:
                self._when = when
                self._changed.notify()

    def close(self) -> None:
        """Stop the thread; `on_time` is not called afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout=2)

    def _run(self) -> None:
        while self._wait():
            self._on_time()

    def _wait(self) -> bool:
        """Block until the set time; False if closed."""
        with self._changed:
            while not self._is_closed:
                remaining_s = None if self._when is None else self._when - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    self._when = None
                    return True
                self._changed.wait(remaining_s)
            return False


class Closer(Protocol):
    def close(self) -> None: ...


def open_consumer(
    config: ConnectorConfig,
    num_ranks: int,
    budget: int,
    cache: EncoderCache,
    encodes_request: Callable[[Any], bool] = encodes_no_request,
    slab: UsableSlab | None = None,
) -> tuple[Consumer, tuple[Closer, ...]]:
    """Connect the consumer to the store and the bus.

    Args:
        num_ranks: tensor-parallel workers, each of which ends every pin.
        budget: rows of encoder output that may be held for requests at once.
        cache: vLLM's encoder cache.
        encodes_request: whether the instance encodes a request's items itself.
        slab: what is known of the store's slab; it changes. None: no GPU.

    Returns:
        The consumer, and what is to be closed after it, in order.
    """
    names = StreamNames(config.deployment)
    bus = ThreadedBus(config.redis_url, config.deployment, client_name=f"{config.instance}/engine")
    blobs = BlobStore(config.redis_url, config.deployment, client_name=f"{config.instance}/pins")
    inbox = Inbox()
    pins = open_pins(config, num_ranks, inbox, Readable(slab or UsableSlab(), blobs))
    alarm = Alarm(inbox.wake_engine)
    consumer = Consumer(
        config.instance,
        pins,
        BusMessageSender(bus, names),
        make_preallocator(config.preallocation, budget),
        cache,
        inbox,
        set_alarm=alarm.set,
        encodes_request=encodes_request,
    )

    def on_metadata(envelope: Envelope) -> None:
        if isinstance(envelope.message, EncoderCacheMetadata):
            inbox.post_event(envelope.message)

    bus.on_server_changed(lambda: inbox.post_event(BusChanged()))
    bus.subscribe(
        names.metadata(config.instance), group=OWNER_GROUP, consumer=config.instance, callback=on_metadata
    )
    log.info("consumer ready", budget_embeds=budget, strategy=config.preallocation)
    return consumer, (alarm, pins, blobs, bus)


def open_pins(
    config: ConnectorConfig, num_ranks: int, inbox: Inbox, can_read: Callable[[Descriptor], bool]
) -> ReadablePins:
    """Open the store session; its replies and pushes pass the readability check.

    The store sends nothing before the check asks for a pin.
    """

    def on_push(push: EntrySealed | WriterLost) -> None:
        pins.on_store_push(push)

    def on_reply(mm_hash: str, reply: StoreReply | StoreError) -> None:
        pins.on_store_reply(mm_hash, reply)

    session = StoreSession.connect(
        config.store_socket,
        engine_session_name(config.instance),
        on_push=on_push,
        on_disconnect=lambda error: inbox.post_event(StoreLost()),
        timeout_s=config.store_timeout_s,
        reconnect_timeout_s=STORE_RECONNECT_S,
        namespace_digest=config.namespace_digest,
    )
    pins = ReadablePins(
        StorePins(session, num_ranks, on_reply),
        can_read,
        deliver_reply=lambda mm_hash, reply: inbox.post_event(PinReply(mm_hash, reply)),
        deliver_push=inbox.post_event,
    )
    return pins
