"""Redis Streams: small messages between services.

async_bus         AsyncBus: for asyncio services; `check_login` tries Redis before an engine is loaded
threaded_bus      ThreadedBus: for code that must never block (vLLM's EngineCore)
publisher         appends entries, within the bounds of each stream
stream_consumer   takes entries: flow control, takeover, reconnection
consumer_options  settings of a consumer
fair_share        picks the consumer that takes the next entry
consumer_group    typed commands of one consumer in one group
dead_letters      entries that no consumer can handle
idle_consumers    removes names of consumers that never come back
inspection        reads streams without taking part, for operators' tools
"""

from triptych_common.bus.async_bus import AsyncBus, check_login
from triptych_common.bus.consumer_options import ConsumerOptions
from triptych_common.bus.idle_consumers import drop_idle_consumers
from triptych_common.bus.stream_consumer import Delivery, StreamConsumer
from triptych_common.bus.threaded_bus import ThreadedBus

__all__ = [
    "AsyncBus",
    "ConsumerOptions",
    "Delivery",
    "StreamConsumer",
    "ThreadedBus",
    "check_login",
    "drop_idle_consumers",
]
