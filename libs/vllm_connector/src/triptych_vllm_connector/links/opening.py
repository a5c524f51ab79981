"""The consumer with its links to store and bus, as an engine opens it. Without vLLM."""

from collections.abc import Callable
from typing import Any, Protocol

from triptych_common.bus import ThreadedBus
from triptych_common.coordination import BlobStore
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncoderCacheMetadata
from triptych_common.protocol.names import OWNER_GROUP, StreamNames
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.local_encode import no_tower
from triptych_vllm_connector.consumer.preallocator import make_preallocator
from triptych_vllm_connector.links.alarm import Alarm
from triptych_vllm_connector.links.inbox import BusChanged, Inbox, PinReply, StoreLost
from triptych_vllm_connector.links.links import BusMessageSender, StorePinLink
from triptych_vllm_connector.links.readable_pins import ReadablePins
from triptych_vllm_connector.readable import Readable
from triptych_vllm_connector.slab_probe import UsableSlab

log = get_logger(__name__)


class Closer(Protocol):
    """What must be closed in the end."""

    def close(self) -> None: ...


def open_consumer(
    config: ConnectorConfig,
    num_ranks: int,
    budget: int,
    encodes: Callable[[Any], bool] = no_tower,
    slab: UsableSlab | None = None,
) -> tuple[Consumer, tuple[Closer, ...]]:
    """Connect to the store and the bus.

    Args:
        num_ranks: tensor-parallel workers, each of which ends every pin.
        budget: rows of encoder output that may be held for requests at once.
        encodes: whether the instance encodes a request's items itself.
        slab: what is known of the store's slab; it changes. None: no GPU.

    Returns:
        The consumer, and what is to be closed after it, in order.
    """
    names = StreamNames(config.deployment)
    bus = ThreadedBus(config.redis_url, config.deployment, client_name=f"{config.instance}/engine")
    blobs = BlobStore(config.redis_url, config.deployment, client_name=f"{config.instance}/pins")
    inbox = Inbox()  # before the consumer: a session may be lost as soon as it is open
    pins = ReadablePins(
        lambda on_reply, on_push: StorePinLink(
            config, num_ranks, on_reply, on_push, on_lost=lambda: inbox.post(StoreLost())
        ),
        Readable(slab or UsableSlab(), blobs),
        on_reply=lambda mm_hash, reply: inbox.post(PinReply(mm_hash, reply)),
        on_push=inbox.post,
    )
    consumer = Consumer(
        config.instance,
        pins,
        BusMessageSender(bus, names),
        make_preallocator(config.preallocation, budget),
        encodes=encodes,
        inbox=inbox,
    )
    alarm = Alarm(consumer.wake)
    consumer.deadlines.bind(alarm.set)

    def on_metadata(envelope: Envelope) -> None:
        if isinstance(envelope.message, EncoderCacheMetadata):
            consumer.post(envelope.message)

    bus.on_server_changed(lambda: consumer.post(BusChanged()))
    bus.subscribe(
        names.metadata(config.instance), group=OWNER_GROUP, consumer=config.instance, callback=on_metadata
    )
    log.info("consumer ready", budget_embeds=budget, strategy=config.preallocation)
    return consumer, (alarm, pins, blobs, bus)
