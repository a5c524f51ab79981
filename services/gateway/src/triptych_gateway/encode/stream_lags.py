"""StreamLags: entries that wait on the gateway's streams, read from Redis for a scrape.

They are never read for a request, and at most once per `READ_INTERVAL_S`. While Redis does not answer in time
there are no figures, and `gateway_redis_up` is 0.
"""

import asyncio
import time
from itertools import product

from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import GroupLag, read_clock_s, read_lags, read_pending
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP, everything
from triptych_gateway.encode.item_queue import ItemQueue
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.routing.registry_view import RegistryView

READ_INTERVAL_S = 1.0
READ_LIMIT_S = 1.0  # a scrape does not wait for a slow Redis
MAX_NAMESPACES = 64  # that are read; each is served by engines of its own
MAX_STREAMS = 256  # streams of jobs that are read

JobStream = tuple[str, str]  # namespace digest, store


class StreamLags:
    """Setter of the gauges, for one event loop."""

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
            num = sum(count for lane, count in waiting.items() if lane.encode_class is each)
            self._metrics.orders_waiting.labels(each.value).set(num)
        self._metrics.flows_waiting.set(len({lane.flow for lane in waiting}))
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
