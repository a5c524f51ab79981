"""Interfaces that the consumer needs: implemented in `links` and `scheduler`, faked in tests."""

from typing import Protocol

from triptych_common.protocol.messages import Message


class PinLink(Protocol):
    """The store's commands about pins, which never block; replies come to the `Inbox` from other threads."""

    def pin_or_watch(self, mm_hash: str) -> None: ...

    def unpin(self, pin_id: int) -> None: ...

    def unwatch(self, mm_hash: str) -> None: ...


class MessageSender(Protocol):
    """The bus, as far as the consumer publishes on it."""

    def send_to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None: ...

    def send_to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None: ...


class EncoderCache(Protocol):
    """vLLM's encoder cache, as its manager keeps it."""

    def evict_item(self, mm_hash: str) -> None:
        """Drop the item from the cache."""

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        """True if vLLM has scheduled the item at this place and will report it as computed."""
