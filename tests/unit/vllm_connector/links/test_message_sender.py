"""The message sender: each message goes to the stream of its receiver."""

from typing import Any

from tests.support.vllm_connector.fake_engine import mm_hash
from triptych_common.protocol.messages import Decision, EncodeNeeded, ItemAck, Outcome, Preallocation
from triptych_common.protocol.names import StreamNames
from triptych_vllm_connector.links.opening import BusMessageSender

ITEM: dict[str, Any] = {"request_id": "r", "item_index": 0, "mm_hash": mm_hash("a"), "prefill_decode": "pd-0"}


class FakeBus:
    def __init__(self) -> None:
        self.published: list[tuple[str, str]] = []

    def publish(self, stream: str, message: Any, *, traceparent: str | None = None) -> None:
        self.published.append((stream, message.TYPE))


def test_messages_go_to_the_streams_of_those_they_are_for() -> None:
    bus, names = FakeBus(), StreamNames("d")
    sender = BusMessageSender(bus, names)  # type: ignore[arg-type]
    sender.send_to_encoder("e", Preallocation(**ITEM, job_id="j", decision=Decision.GRANTED), None)
    sender.send_to_encoder("e", ItemAck(**ITEM, job_id="j", outcome=Outcome.INJECTED), None)
    sender.send_to_gateway("g", EncodeNeeded(**ITEM, reason="absent"), None)
    assert bus.published == [
        (names.preallocations("e"), "Preallocation"),
        (names.acks("e"), "ItemAck"),
        (names.encode_results("g"), "EncodeNeeded"),
    ]
