"""Accepts links through Redis: the calling agent has created the streams."""

import time
from functools import partial

from triptych_cache_store.fabric.target.listener import FabricListener
from triptych_cache_store.fabric.wire.channel import ChannelError
from triptych_cache_store.fabric.wire.redis_links import RedisLinks, open_in_thread
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.protocol.names import OWNER_GROUP
from triptych_common.protocol.transfers import LinkCall
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_CALLS = 32  # read ahead


class LinkCalls:
    """Accepts calls; used in one event loop."""

    def __init__(
        self,
        bus: AsyncBus,
        instance: str,
        links: RedisLinks,
        listener: FabricListener,
    ) -> None:
        self._consumer = bus.consumer(
            bus.names.link_calls(instance), group=OWNER_GROUP, consumer=instance, prefetch=MAX_CALLS
        )
        self._links = links
        self._listener = listener

    async def run(self) -> None:
        """Accept calls until cancelled."""
        async with self._consumer:
            async for delivery in self._consumer:
                await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        envelope = delivery.envelope
        delivery.ack_soon()  # whatever comes of it: who called calls again, with other streams
        call = envelope.message
        is_late = envelope.deadline is not None and envelope.deadline <= time.monotonic()
        if not isinstance(call, LinkCall) or is_late or not self._listener.has_room():
            return
        try:
            channel = await open_in_thread(partial(self._links.attach, call.link_id))
        except ChannelError as error:
            log.info("fabric call not taken", source=call.source, error=str(error))
            return
        self._listener.take(channel)
