"""Table of encoder and prefill_decode pairs, with the transport between them."""

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families
from rich.markup import escape
from rich.table import Table

from triptych_cli.commands.clients import message_bus, store_session
from triptych_cli.console import plain_table
from triptych_common.coordination import Registry
from triptych_common.domain.transports import Pair, StoreSlab, choose_pairs
from triptych_common.protocol.store import MetricsQuery, StoreMetrics

HANDED_OVER = "triptych_store_handed_over"


async def pairs_table() -> Table:
    """One row per pair: the producer's current choice, and tensors handed over by transport.

    Raises:
        TriptychError: Redis or the store cannot be reached.
    """
    async with message_bus() as bus, store_session() as session:
        slab = StoreSlab.of_welcome(session.welcome)
        pairs = choose_pairs(await Registry(bus).list_instances(), slab)
        reply = await session.request(MetricsQuery(seq=0))
    counted = num_handed_over(reply.text) if isinstance(reply, StoreMetrics) else {}
    has_failures = any(pair.slab_failure for pair in pairs)
    columns = ("from", "to", "transport", "tensors so far")
    table = plain_table(*columns, *(["why not cuda_ipc"] if has_failures else []))
    for pair in pairs:
        row = [
            escape(pair.producer),
            escape(pair.consumer),
            pair.transport.value,
            format_counts(pair, counted),
        ]
        table.add_row(*row, *([escape(pair.slab_failure or "")] if has_failures else []))
    return table


def num_handed_over(text: str) -> dict[tuple[str, str, str], int]:
    """Tensors by producer, consumer and transport, from the store's metrics `text`."""
    return {
        (sample.labels["producer"], sample.labels["consumer"], sample.labels["transport"]): int(sample.value)
        for family in text_string_to_metric_families(text)
        if family.name == HANDED_OVER
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def format_counts(pair: Pair, counted: Mapping[tuple[str, str, str], int]) -> str:
    """Text such as `12`, or `12 pinned_shm, 3 cuda_ipc` if the transport has changed."""
    by_transport = {
        transport: number
        for (producer, consumer, transport), number in sorted(counted.items())
        if (producer, consumer) == (pair.producer, pair.consumer)
    }
    if set(by_transport) <= {pair.transport.value}:
        return str(sum(by_transport.values()))
    return ", ".join(f"{number} {transport}" for transport, number in by_transport.items())
