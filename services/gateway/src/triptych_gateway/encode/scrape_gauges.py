"""Gauges that a scrape sets: entries that wait on the streams, and work that waits for each stage."""

import asyncio
import time
from collections import defaultdict
from itertools import product

from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import GroupLag, read_clock_s, read_lags, read_pending
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP, everything
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import LANGUAGE_ROLES, STAGE_ROLES, Router
from triptych_gateway.routing.scheduling.candidates import ServingStage

READ_INTERVAL_S = 1.0
READ_LIMIT_S = 1.0  # a scrape does not wait for a slow Redis
MAX_NAMESPACES = 64  # that are read, and have series of their own; each is served by engines of its own
MAX_STREAMS = 256  # streams of jobs that are read

JobStream = tuple[str, str]  # namespace digest, store


class StreamLags:
    """Setter of the gauges of streams and orders, for one event loop."""

    def __init__(
        self, bus: AsyncBus, view: RegistryView, gateway: str, metrics: GatewayMetrics, orders: ItemQueue
    ) -> None:
        self._bus = bus
        self._view = view
        self._gateway = gateway
        self._metrics = metrics
        self._orders = orders
        self._reading = asyncio.Lock()
        self._read_at = float("-inf")  # monotonic seconds
        self.jobs: dict[JobStream, GroupLag] = {}  # as last read; empty while Redis does not answer
        self.oldest_job_s: dict[JobStream, float] = {}  # age of the oldest job, in seconds

    async def measure(self) -> None:
        """Read the streams, unless that was done just now. Never raises for Redis."""
        waiting = self._orders.num_waiting()
        for each in EncodeClass:
            num = sum(count for fair_key, count in waiting.items() if fair_key.encode_class is each)
            self._metrics.orders_waiting.labels(each.value).set(num)
        self._metrics.flows_waiting.set(len({fair_key.flow for fair_key in waiting}))
        oldest = self._orders.oldest_of_all()
        self._metrics.oldest_order_s.set(0.0 if oldest is None else max(0.0, time.monotonic() - oldest))
        async with self._reading:
            if time.monotonic() - self._read_at < READ_INTERVAL_S:
                return
            try:
                async with asyncio.timeout(READ_LIMIT_S):
                    await self._read()
                self._metrics.redis_up.set(1)
            except (BusUnavailableError, TimeoutError):
                self._forget()
                self._metrics.redis_up.set(0)
            self._read_at = time.monotonic()

    async def _read(self) -> None:
        names = self._bus.names
        prefix = everything(names).removesuffix("*")
        of_jobs = {names.encode_jobs(*each).removeprefix(prefix): each for each in self._job_streams()}
        results = names.encode_results(self._gateway).removeprefix(prefix)
        lags = await read_lags(self._bus, [*of_jobs, results])
        now_s = await read_clock_s(self._bus)
        num_dead = await self._bus.stream_length(names.dead_letters)
        self._forget()
        self._metrics.results_waiting.set(0)
        for lag in lags:
            stream = of_jobs.get(lag.stream)
            if stream is not None:
                self._set_jobs(stream, lag, now_s)
            else:
                self._metrics.results_waiting.set(lag.num_entries)
        self._metrics.dead_letters.set(num_dead)

    def _job_streams(self) -> list[JobStream]:
        """Return the streams of every namespace at every store, also without encoders."""
        namespaces = sorted(self._view.namespaces)[:MAX_NAMESPACES]
        stores = sorted({each.store for each in self._view.records if each.store}) or [DEFAULT_STORE]
        return list(product(namespaces, stores))[:MAX_STREAMS]

    async def read_in_hand(self) -> dict[str, int]:
        """Return jobs in hand by encoder; empty if Redis does not answer in time."""
        streams = [self._bus.names.encode_jobs(*each) for each in self._job_streams()]
        try:
            async with asyncio.timeout(READ_LIMIT_S):
                return await read_pending(self._bus, streams, ENCODERS_GROUP)
        except (BusUnavailableError, TimeoutError):
            return {}

    def _forget(self) -> None:
        self._metrics.forget_streams()
        self.jobs.clear()
        self.oldest_job_s.clear()

    def _set_jobs(self, stream: JobStream, lag: GroupLag, now_s: float) -> None:
        age_s = 0.0 if lag.oldest_s is None else max(0.0, now_s - lag.oldest_s)
        self.jobs[stream], self.oldest_job_s[stream] = lag, age_s
        self._metrics.jobs_waiting.labels(*stream).set(lag.num_waiting)
        self._metrics.jobs_pending.labels(*stream).set(lag.num_pending)
        self._metrics.oldest_job_s.labels(*stream).set(age_s)


PREFILLING = STAGE_ROLES[ServingStage.WHOLE] | STAGE_ROLES[ServingStage.PREFILL]
DECODING = STAGE_ROLES[ServingStage.WHOLE] | STAGE_ROLES[ServingStage.DECODE]

Series = tuple[str, str]  # model, role


class WaitingWork:
    def __init__(
        self, orders: EncodeOrders, view: RegistryView, router: Router, metrics: GatewayMetrics
    ) -> None:
        self._orders, self._view, self._router, self._metrics = orders, view, router, metrics

    def measure(self) -> None:
        """Set the gauges of waiting work from the present state."""
        now = time.monotonic()
        self._metrics.forget_waiting_work()
        for digest in sorted(self._view.namespaces)[:MAX_NAMESPACES]:
            waiting_s = self._orders.admission.backlog.waiting_s(digest, self._is_counted_here, now)
            self._metrics.encode_waiting_s.labels(digest).set(waiting_s)
            num_waiting = 0 if self._view.has_encoder(digest) else self._orders.num_waiting(digest)
            self._metrics.waiting_for_first_encoder.labels(digest).set(num_waiting)
        num_without_items = self._orders.num_without_items()
        prefill_s, decode_s = defaultdict[Series, float](float), defaultdict[Series, float](float)
        for record in self._view.records:
            if record.role not in LANGUAGE_ROLES:
                continue
            series = self._metrics.latencies.bounded(record.model or ""), record.role.value
            waiting = self._router.waiting_at(record, num_without_items[record.instance], now)
            if record.role in PREFILLING:
                prefill_s[series] += waiting.prefill_s
            if record.role in DECODING:
                decode_s[series] += waiting.decode_s
        for gauge, seconds in (
            (self._metrics.prefill_waiting_s, prefill_s),
            (self._metrics.decode_waiting_s, decode_s),
        ):
            for series, value in seconds.items():
                gauge.labels(*series).set(value)

    def _is_counted_here(self, mm_hash: MmHash) -> bool:
        """Return False for an item that another gateway has ordered, which counts there."""
        item = self._orders.table.get(mm_hash)
        return item is None or not item.is_claimed or mm_hash in self._orders.queue.window
