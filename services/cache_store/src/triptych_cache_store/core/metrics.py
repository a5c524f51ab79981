"""Store metrics in Prometheus' text format, computed from the state at each scrape."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from triptych_cache_store.core.state import BOUNDS_S, HandedOver, Slab, StoreState
from triptych_cache_store.entries.entry_table import EntryState

STATES = (EntryState.WRITING, EntryState.READY, EntryState.PINNED, EntryState.ABANDONED)


def render(state: StoreState, now: float) -> str:
    """Text of one scrape at `now` (monotonic seconds); without `Metrics`, to count nothing twice."""
    registry = CollectorRegistry()
    registry.register(_Collector(state, now))
    return generate_latest(registry).decode()


class _Collector(Collector):
    def __init__(self, state: StoreState, now: float) -> None:
        self._state = state
        self._now = now

    def collect(self) -> Iterator[Metric]:
        state, space, leases, counters = (
            self._state, self._state.space, self._state.leases, self._state.counters
        )  # fmt: skip
        yield self._bytes()
        if state.slab is not None:
            yield self._slab_bytes(state.slab)
        yield _gauge("entries", "Sealed entries.", space.table.num_entries)
        yield _gauge("reservations", "Reservations not sealed yet.", space.table.num_reservations)
        yield _gauge("pins", "Pins held.", leases.num_pins)
        yield _gauge("watches", "Pairs of a client and an entry it waits for.", leases.num_watches)
        yield _gauge("sessions", "Clients connected.", leases.num_sessions)
        yield _gauge("detached_clients", "Living clients without a connection.", leases.num_detached)
        opened = (lease.opened_at for lease in leases.all_leases())
        yield _gauge("oldest_lease_seconds", "Age of the oldest client lease.", self._oldest(opened))
        reserved = (entry.reserved_at for entry in space.table.all_unsealed())
        yield _gauge("oldest_reservation_seconds", "Age of the oldest reservation.", self._oldest(reserved))
        yield _gauge("unchecked_entries", "Entries without checksum.", len(state.verify_queue.sealed))
        yield _counter("seals", "Seals that made an entry.", counters.num_seals)
        yield _counter("hits", "Pins of an entry that was sealed.", counters.num_hits)
        yield _counter("misses", "Pins that had to wait.", counters.num_misses)
        yield _counter("evictions", "Entries evicted.", sum(each.num_evictions for each in state.spaces))
        yield self._pinned()
        refused = CounterMetricFamily(
            "triptych_store_refusals", "Commands refused.", labels=("command", "reason")
        )
        for (command, code), number in sorted(counters.num_refused.items()):
            refused.add_metric((command, code), number)
        yield refused
        yield self._seal_to_pin()

    def _bytes(self) -> Metric:
        """Bytes in whole blocks; all states together are the region without its headers."""
        layout, space = self._state.identity.layout, self._state.space
        family = GaugeMetricFamily(
            "triptych_store_bytes", "Bytes by state, in whole blocks.", labels=("state",)
        )
        family.add_metric(("free",), space.pool.num_free_blocks * layout.block_num_bytes)
        for each in STATES:
            family.add_metric((str(each),), space.table.num_bytes[each])
        return family

    def _slab_bytes(self, slab: Slab) -> Metric:
        family = GaugeMetricFamily(
            "triptych_store_slab_bytes", "Device memory, in whole blocks.", labels=("memory", "state")
        )
        block_num_bytes, pool = self._state.identity.layout.block_num_bytes, slab.space.pool
        family.add_metric((slab.info.memory, "free"), pool.num_free_blocks * block_num_bytes)
        used = pool.num_blocks - pool.num_free_blocks
        family.add_metric((slab.info.memory, "used"), used * block_num_bytes)
        return family

    def _pinned(self) -> Metric:
        family = CounterMetricFamily(
            "triptych_store_handed_over",
            "Pins given, by the writer of the entry, the client that pinned it, and how its bytes get there.",
            labels=HandedOver._fields,
        )
        for pair, number in sorted(self._state.counters.num_pinned.items()):
            family.add_metric(pair, number)
        return family

    def _seal_to_pin(self) -> Metric:
        latencies = self._state.counters.seal_to_pin
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), latencies.counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(
            "triptych_store_seal_to_pin_seconds",
            "From an entry's seal to its first pin; 0 for a client that waited.",
            buckets=buckets,
            sum_value=latencies.sum_s,
        )

    def _oldest(self, times: Iterable[float]) -> float:
        return max(0.0, self._now - min(times, default=self._now))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"triptych_store_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"triptych_store_{name}", text, value=value)
