"""Models of the consumer's neighbours: the cache store, and the bus.

Each acts only when a test makes it. Messages are delivered in any order, but for the end of a session, which
is the last.
"""

from collections import deque

from tests.support.vllm_connector.fake_engine import pinned, sealed, watching, writer_lost
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.messages import EncodeNeeded, ItemAck, Message
from triptych_common.protocol.store import StoreFailure
from triptych_vllm_connector.consumer.consumer import InboxEvent, PinReply, StoreLost


class StoreModel:
    """`PinLink`, and the store behind it: commands wait for `run_next`, answers for delivery."""

    def __init__(self) -> None:
        self.commands: deque[tuple[str, str | int]] = deque()
        self.to_engine: list[InboxEvent] = []
        self.sealed: set[str] = set()
        self.writing: set[str] = set()
        self.watches: set[str] = set()
        self.pins: dict[int, str] = {}
        self.num_pins = 0
        self.refuses_next = False
        self.is_lost = False

    # ---- PinLink ----
    def pin_or_watch(self, mm_hash: str) -> None:
        if self.is_lost:
            self.to_engine.append(PinReply(mm_hash, StoreUnavailableError("gone")))
        else:
            self.commands.append(("pin_or_watch", mm_hash))

    def unpin(self, pin_id: int) -> None:
        self.commands.append(("unpin", pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self.commands.append(("unwatch", mm_hash))

    # ---- the store ----
    def run_next(self) -> None:
        command, argument = self.commands.popleft()
        if self.is_lost:
            return
        match command, argument:
            case "pin_or_watch", str():
                self._pin_or_watch(argument)
            case "unwatch", str():
                self.watches.discard(argument)
            case "unpin", int():
                self.end_pin(argument)

    def end_pin(self, pin_id: int) -> None:
        if not self.is_lost:
            assert pin_id in self.pins, "a pin ended twice"
            del self.pins[pin_id]

    def seal(self, identifier: str) -> None:
        self.writing.discard(identifier)
        self.sealed.add(identifier)
        if identifier in self.watches:
            self.watches.discard(identifier)
            self.to_engine.append(sealed(identifier, self._new_pin(identifier)))

    def lose_writer(self, identifier: str) -> None:
        self.writing.discard(identifier)
        if identifier in self.watches:
            self.to_engine.append(writer_lost(identifier))

    def evict(self, identifier: str) -> None:
        if identifier not in self.pins.values():
            self.sealed.discard(identifier)

    def lose(self) -> None:
        """The session ends; what is under way is answered before."""
        while self.commands:
            command, argument = self.commands.popleft()
            if command == "pin_or_watch":
                self.to_engine.append(PinReply(str(argument), StoreUnavailableError("gone")))
        self.to_engine.append(StoreLost())
        self.is_lost = True
        self.pins.clear()
        self.watches.clear()

    def _pin_or_watch(self, identifier: str) -> None:
        if self.refuses_next:
            self.refuses_next = False
            reply = PinReply(identifier, StoreFailure(seq=1, code="internal", detail="refused"))
        elif identifier in self.sealed:
            reply = PinReply(identifier, pinned(identifier, self._new_pin(identifier)))
        else:
            self.watches.add(identifier)
            reply = PinReply(identifier, watching(identifier, writing=identifier in self.writing))
        self.to_engine.append(reply)

    def _new_pin(self, identifier: str) -> int:
        self.num_pins += 1
        self.pins[self.num_pins] = identifier
        return self.num_pins


class SenderModel:
    """`MessageSender`: the acks that encoders got, and what is under way to the gateway."""

    def __init__(self) -> None:
        self.acks: set[tuple[str, str, int]] = set()  # (job, wire id, place)
        self.needs: list[EncodeNeeded] = []

    def send_to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None:
        if isinstance(message, ItemAck):
            self.acks.add((message.job_id, message.request_id, message.item_index))

    def send_to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None:
        assert isinstance(message, EncodeNeeded)
        self.needs.append(message)
