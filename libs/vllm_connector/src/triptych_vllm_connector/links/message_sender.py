"""Message sender: what EngineCore publishes for encoders and gateways."""

from triptych_common.bus import ThreadedBus
from triptych_common.protocol.messages import Message
from triptych_common.protocol.names import StreamNames


class BusMessageSender:
    """`MessageSender` over a `ThreadedBus`: a message is queued, and published by the bus' thread."""

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
