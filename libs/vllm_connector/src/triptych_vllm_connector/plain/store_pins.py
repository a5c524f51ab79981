"""Pins of an EngineCore with vLLM's own scheduler, requested when an item is needed."""

from typing import NamedTuple

from triptych_common.protocol.store import (
    SHM,
    Descriptor,
    EntrySealed,
    Pinned,
    PinOrWatch,
    StoreFailure,
    Unwatch,
    Watching,
    WriterLost,
)
from triptych_common.store_session import StoreSession
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import STORE_RECONNECT_S, StoreConfig, engine_session_name
from triptych_vllm_connector.plain.bounded_calls import BoundedCalls, end_pin
from triptych_vllm_connector.plain.reopened import Reopened

log = get_logger(__name__)


class StorePin(NamedTuple):
    """A pinned tensor. Its holder ends the pin, once for each rank."""

    pin_id: int
    descriptor: Descriptor
    region_id: str  # in another region the descriptor means nothing


class BoundedPins:
    """Each call costs a round trip, or `store_timeout_s` at most; `num_ranks` unpins end a pin."""

    def __init__(self, config: StoreConfig, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._calls = BoundedCalls(config.store_timeout_s)
        self._session = Reopened(lambda: self._open_session(config))
        self._session.try_get()  # now: its absence shows in the log of the engine's start

    def try_pin(self, mm_hash: str) -> StorePin | None:
        """Pin the item; None if the store does not have it, or is unreachable, late or full."""
        session = self._session.try_get()
        if session is None:
            return None
        command = PinOrWatch(seq=0, mm_hash=mm_hash, num_holders=self._num_ranks)
        reply = self._calls.try_call(session, command)
        if isinstance(reply, Watching):
            session.submit(Unwatch(seq=0, mm_hash=mm_hash))
        elif isinstance(reply, StoreFailure):
            log.warning("store pins nothing", code=reply.code, detail=reply.detail)
        if not isinstance(reply, Pinned):
            return None
        if reply.descriptor.memory != SHM:  # written by Triptych's own engines; no worker here can read it
            end_pin(session, reply.pin_id, self._num_ranks)
            return None
        return StorePin(reply.pin_id, reply.descriptor, session.welcome.region_id)

    def is_current(self, pin: StorePin) -> bool:
        """True if the pin is of the current store, as far as is known."""
        session = self._session.try_get()
        return session is not None and (session.welcome.region_id, session.welcome.generation) == (
            pin.region_id,
            pin.descriptor.generation,
        )

    def unpin(self, pin: StorePin) -> None:
        session = self._session.try_get()
        if session is not None and session.welcome.region_id == pin.region_id:
            end_pin(session, pin.pin_id, self._num_ranks)

    def close(self) -> None:
        self._session.close()

    def _open_session(self, config: StoreConfig) -> StoreSession:
        def on_push(push: EntrySealed | WriterLost) -> None:
            """End the pin of a watch that was not ended in time; its request went on without."""
            if isinstance(push, EntrySealed):
                end_pin(session, push.pin_id, self._num_ranks)

        session = StoreSession.connect(
            config.store_socket,
            engine_session_name(config.instance),
            on_push=on_push,
            timeout_s=config.store_timeout_s,
            reconnect_timeout_s=STORE_RECONNECT_S,
            namespace_digest=config.namespace_digest,
        )
        log.info("store session opened", region_id=session.welcome.region_id)
        return session
