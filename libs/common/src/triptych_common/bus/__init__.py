"""Redis Streams: the conversation between services. The only package that imports redis."""

from triptych_common.bus.asyncbus import AsyncBus
from triptych_common.bus.blobs import BlobMissingError, BlobStore
from triptych_common.bus.consumer import Consumer, Delivery
from triptych_common.bus.consumer_options import ConsumerOptions
from triptych_common.bus.inflight import Claim, Inflight, Standing, Start
from triptych_common.bus.preflight import check_login
from triptych_common.bus.presence import is_registered
from triptych_common.bus.registry import Registration, Registry
from triptych_common.bus.sizes import SharedSizes
from triptych_common.bus.threaded import ThreadedBus
from triptych_common.bus.upkeep import drop_idle_consumers

__all__ = [
    "AsyncBus",
    "BlobMissingError",
    "BlobStore",
    "Claim",
    "Consumer",
    "ConsumerOptions",
    "Delivery",
    "Inflight",
    "Registration",
    "Registry",
    "SharedSizes",
    "Standing",
    "Start",
    "ThreadedBus",
    "check_login",
    "drop_idle_consumers",
    "is_registered",
]
