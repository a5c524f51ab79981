"""What EngineCore talks to, as the consumer sees it: two narrow interfaces, testable without the rest."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from triptych_common.bus import ThreadedBus
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import Message
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.store import (
    EntrySealed,
    Evict,
    PinOrWatch,
    StoreReply,
    Unpin,
    Unwatch,
    WriterLost,
)
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.config import STORE_RECONNECT_S, ConnectorConfig, engine_session_name

OnReply = Callable[[str, StoreReply | StoreError], None]
OnPush = Callable[[EntrySealed | WriterLost], None]


class PinLink(Protocol):
    """The store, as far as pins go. Nothing here blocks; answers come on another thread."""

    def pin_or_watch(self, mm_hash: str) -> None: ...

    def unpin(self, pin_id: int) -> None: ...

    def unwatch(self, mm_hash: str) -> None: ...


class MessageSender(Protocol):
    """The bus, as far as the consumer speaks on it."""

    def to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None: ...

    def to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None: ...


class StorePinLink:
    """`PinLink` over a `StoreSession`. `num_holders` unpins end each pin (one per tensor-parallel rank)."""

    def __init__(
        self,
        config: ConnectorConfig,
        num_holders: int,
        on_reply: OnReply,
        on_push: OnPush,
        on_lost: Callable[[], None],
    ) -> None:
        self._num_holders = num_holders
        self._on_reply = on_reply
        self._session = StoreSession.connect(
            config.store_socket,
            engine_session_name(config.instance),
            on_push=on_push,
            on_disconnect=lambda error: on_lost(),
            timeout_s=config.store_timeout_s,
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=config.namespace_digest,
        )

    def pin_or_watch(self, mm_hash: str) -> None:
        future = self._session.submit(PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=self._num_holders))

        def deliver(done: Future[StoreReply]) -> None:
            try:
                self._on_reply(mm_hash, done.result())
            except StoreError as error:
                self._on_reply(mm_hash, error)

        future.add_done_callback(deliver)

    def unpin(self, pin_id: int) -> None:
        for _ in range(self._num_holders):
            self._session.submit(Unpin(seq=0, pin_id=pin_id))

    def unwatch(self, mm_hash: str) -> None:
        self._session.submit(Unwatch(seq=0, mm_hash=mm_hash))

    def evict(self, mm_hash: str) -> None:
        """Have the entry made anew, unless somebody else uses it."""
        self._session.submit(Evict(seq=0, mm_hash=mm_hash))

    def close(self) -> None:
        self._session.close()


class BusMessageSender:
    """`MessageSender` over a `ThreadedBus`."""

    def __init__(self, bus: ThreadedBus, names: StreamNames) -> None:
        self._bus = bus
        self._names = names

    def to_encoder(self, encoder: str, message: Message, traceparent: str | None) -> None:
        stream = (
            self._names.acks(encoder) if message.TYPE == "ItemAck" else self._names.preallocations(encoder)
        )
        self._bus.publish(stream, message, traceparent=traceparent)

    def to_gateway(self, gateway: str, message: Message, traceparent: str | None) -> None:
        self._bus.publish(self._names.encode_results(gateway), message, traceparent=traceparent)
