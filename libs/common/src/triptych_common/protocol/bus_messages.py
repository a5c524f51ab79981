"""List of every message that travels on Redis Streams, for the codec and the steps."""

from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncodeNeeded,
    EncoderCacheMetadata,
    ItemAck,
    Message,
    Preallocation,
)
from triptych_common.protocol.transfers import TRANSFER_MESSAGES

BUS_MESSAGES: tuple[type[Message], ...] = (
    EncodeJob,
    EncoderCacheMetadata,
    EncodeCompleted,
    EncodeFailed,
    Preallocation,
    ItemAck,
    EncodeNeeded,
    *TRANSFER_MESSAGES,
)
