"""Redis Streams: small messages between services.

async_bus         AsyncBus: for asyncio services
threaded_bus      ThreadedBus: for code that must never block (vLLM's EngineCore)
publisher         appends entries, within the bounds of `stream_bounds`
stream_consumer   takes entries: flow control, takeover, reconnection
consumer_group    the commands of one consumer in one group, typed
dead_letters      entries that no consumer can handle
idle_consumers    removes names of consumers that never come back
inspection        reads streams without taking part, for operators' tools
login_check       one check of Redis before something expensive is started
"""

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.bus.idle_consumers import drop_idle_consumers
from triptych_common.bus.login_check import check_login
from triptych_common.bus.stream_consumer import ConsumerOptions, Delivery, StreamConsumer
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
