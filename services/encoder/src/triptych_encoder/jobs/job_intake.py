"""Job intake: takes jobs from the stream of the encoder's own store and, when idle, from others.

    own stream --a job--> in hand
        `--empty, and none in hand--> look at the streams of other stores --a spare job--> in hand
                 ^                                 `--none--.
                 `------------------------------------------'

A blocking read of another store's stream would take a job at the moment in which it is published, before its
own encoders do. Redis has no wake-up for a job that stays there: so an idle encoder looks, every
`LOOK_INTERVAL_MS`, and only where its namespace has encoders at other stores. One with a job in hand reads
its own stream as long as any reader, so it looks `BLOCK_MS` after its last job at the latest. What it may
take Redis decides in one step (`take_spare.lua`): the oldest job, once it has waited for as long as its
gateway wants it to be left to the encoders near it, and if those have no free slots for all that wait. One
at a time.
"""

import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from triptych_common.bus import AsyncBus, Delivery, StreamConsumer
from triptych_common.bus.consumer_options import OnDeadLetter
from triptych_common.bus.fair_share import Consumers, Peer
from triptych_common.coordination import Registry, store_of
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.names import ENCODERS_GROUP
from triptych_common.redis_client.commands import BLOCK_MS
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

REFRESH_INTERVAL_S = 1.0

LOOK_INTERVAL_MS = 100


class EncoderPeers:
    """Encoders as of `REFRESH_INTERVAL_S` ago at most, while Redis answers; draining ones are left out."""

    def __init__(self, namespace_digest: str, store: str, registry: Registry) -> None:
        self.namespace_digest = namespace_digest
        self.store = store
        self._registry = registry
        self._near = Consumers()
        self._others: dict[str, dict[str, int]] = {}
        self._refreshed_at = float("-inf")

    async def find(self) -> Consumers:
        """Encoders at this encoder's store, itself included, with their announced speeds."""
        await self._refresh()
        return self._near

    async def find_others(self) -> Mapping[str, Mapping[str, int]]:
        await self._refresh()
        return self._others

    async def _refresh(self) -> None:
        if time.monotonic() - self._refreshed_at <= REFRESH_INTERVAL_S:
            return
        self._refreshed_at = time.monotonic()
        try:
            records = await self._registry.list_instances()
        except BusUnavailableError as error:
            log.warning("encoders not refreshed from the registry", error=str(error))
            return
        encoders = [each for each in records if self._takes_jobs(each)]
        near = [each for each in encoders if store_of(each) == self.store]
        self._near = Consumers({each.instance: Peer(each.row_s, each.num_slots) for each in near})
        self._others = {}
        for each in encoders:
            if store_of(each) != self.store:
                self._others.setdefault(store_of(each), {})[each.instance] = each.num_slots

    def _takes_jobs(self, record: InstanceRecord) -> bool:
        is_of_namespace = record.namespace_digest == self.namespace_digest
        return record.role is Role.ENCODE and is_of_namespace and not record.draining


class JobIntake:
    """Async context manager and async iterator of `Delivery`, like the stream consumers that it uses."""

    def __init__(
        self,
        bus: AsyncBus,
        peers: EncoderPeers,
        instance: str,
        *,
        num_slots: int,
        min_idle_ms: int,
        max_deliveries: int,
        on_dead_letter: OnDeadLetter,
    ) -> None:
        self._bus = bus
        self._peers = peers
        self._instance = instance
        self._min_idle_ms = min_idle_ms
        self._max_deliveries = max_deliveries
        self._on_dead_letter = on_dead_letter
        self._stack = AsyncExitStack()
        self._others: dict[str, StreamConsumer] = {}  # by store; few: stores that were registered
        self._own = bus.consumer(
            self._stream_of(peers.store),
            group=ENCODERS_GROUP,
            consumer=instance,
            prefetch=num_slots,
            min_idle_ms=min_idle_ms,
            max_deliveries=max_deliveries,
            on_dead_letter=on_dead_letter,
            find_peers=peers.find,
            num_elsewhere=self._num_spare,
        )

    def _stream_of(self, store: str) -> str:
        return self._bus.names.encode_jobs(self._peers.namespace_digest, store)

    def _num_spare(self) -> int:
        return sum(each.num_outstanding for each in self._others.values())

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._own)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while True:
            others = await self._peers.find_others()
            delivery = await self._own.take_within(self._block_ms(others))
            if delivery is None and not self._own.is_stopped and not self._num_in_hand:
                delivery = await self._take_spare(others)
            if delivery is not None:
                return delivery
            if self._own.is_stopped:
                raise StopAsyncIteration

    def _block_ms(self, others: Mapping[str, object]) -> int:
        return LOOK_INTERVAL_MS if others and not self._num_in_hand else BLOCK_MS

    @property
    def _num_in_hand(self) -> int:
        return self._own.num_outstanding + self._num_spare()

    def stop(self) -> None:
        """Take no more jobs; iteration ends after those already taken, within one block time."""
        self._own.stop()

    async def _take_spare(self, others: Mapping[str, Mapping[str, int]]) -> Delivery | None:
        """Spare job of the first store that has one; stores take turns at being first."""
        for store in sorted(others, key=self._turn_of):
            if store not in self._others:
                self._others[store] = await self._stack.enter_async_context(self._open(store))
            consumer = self._others[store]
            if (delivery := await consumer.take_spare(others[store])) is not None:
                self._others[store] = self._others.pop(store)  # the last one next time
                return delivery
        return None

    def _turn_of(self, store: str) -> tuple[int, str]:
        turns = list(self._others)
        return (turns.index(store) if store in turns else -1), store

    def _open(self, store: str) -> StreamConsumer:
        return self._bus.consumer(
            self._stream_of(store),
            group=ENCODERS_GROUP,
            consumer=self._instance,
            min_idle_ms=self._min_idle_ms,
            max_deliveries=self._max_deliveries,
            on_dead_letter=self._on_dead_letter,
            on_room=self._own.notice_room,
        )
