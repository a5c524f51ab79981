"""Tables of `status` and `drain`, from the registry and the store; and what is served less than asked for."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from prometheus_client.parser import text_string_to_metric_families
from rich.markup import escape
from rich.table import Table

from triptych_cli.commands.clients import message_bus, store_session
from triptych_cli.console import plain_table
from triptych_cli.system.preflight import ModelConfig, is_text_only
from triptych_common.coordination import Registry
from triptych_common.cores.gpu_plan import BELOW_NORMAL
from triptych_common.domain.transports import CONSUMING_ROLES, PRODUCING_ROLES, Pair, StoreSlab, choose_pairs
from triptych_common.protocol.messages import Compute, InstanceRecord, Role, Transport
from triptych_common.protocol.store import MetricsQuery, StoreMetrics

SERVING = frozenset({Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE})
PREFILLING = frozenset({Role.PREFILL, Role.ENCODE_PREFILL})
SHOWN_DIGITS = 12  # of a namespace's digest: enough to distinguish them
HANDED_OVER = "triptych_store_handed_over"


async def read_records() -> list[InstanceRecord]:
    """Records of the living instances, by name. Raises TriptychError: Redis cannot be reached."""
    async with message_bus() as bus:
        return await Registry(bus).list_instances()


def instance_table(records: Sequence[InstanceRecord]) -> Table:
    table = plain_table("instance", "role", "state", "release", "model", "namespace", "url")
    for record in records:
        state = "draining" if record.draining else "ready"
        digest = (record.namespace_digest or "-")[:SHOWN_DIGITS]
        row = (record.instance, record.role.value, state, record.release, record.model, digest, record.url)
        table.add_row(*(escape(each or "-") for each in row))
    return table


def can_serve(records: Sequence[InstanceRecord]) -> bool:
    """True if the instances can together answer requests."""
    roles = {each.role for each in records if not each.draining}
    return bool(roles & SERVING) or (bool(roles & PREFILLING) and Role.DECODE in roles)


def compute_table(records: Sequence[InstanceRecord]) -> Table:
    """One row per registered engine."""
    table = plain_table("engine", "role", "computes on", "shared by", "core policy")
    for record in records:
        if record.compute is not None:
            compute = record.compute
            place, sharing = describe_place(compute), describe_sharing(compute)
            row = (record.instance, record.role.value, place, sharing, compute.policy or "-")
            table.add_row(*(escape(each) for each in row))
    return table


def describe_place(compute: Compute) -> str:
    """Text such as `cores 0-3,8`, or `GPU 0, 66 multiprocessors`."""
    if compute.gpu is not None:
        gpu = compute.gpu if compute.gpu.startswith(("GPU-", "MIG-")) else f"GPU {compute.gpu}"
        number = compute.num_multiprocessors
        return gpu if number is None else f"{gpu}, {number} multiprocessors"
    if compute.cores:
        return f"cores {_ranges(compute.cores)}"
    return "CPU"


def describe_sharing(compute: Compute) -> str:
    """Text such as `mps with 1 other, below normal`."""
    words = [compute.sharing.value]
    if compute.gpu is not None and compute.num_engines > 1:
        words[0] += f" with {compute.num_engines - 1} other{'s' if compute.num_engines > 2 else ''}"
    if compute.thread_percentage is not None:
        words.append(f"{compute.thread_percentage} % of the threads at most")
    if compute.priority is not None:
        words.append("below normal" if compute.priority == str(BELOW_NORMAL) else "normal")
    return ", ".join(words)


def _ranges(numbers: Sequence[int]) -> str:
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda place: place[1] - place[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def shortfalls(records: Sequence[InstanceRecord], config: ModelConfig, transport: str) -> list[str]:
    """One line for each modality, transport and tower that is missing.

    Args:
        config: of the model; empty: not known.
        transport: as TRIPTYCH_TRANSPORT asks for it.
    """
    return [*_media(records), *_transports(records, transport), *_towers(records, config)]


def _media(records: Sequence[InstanceRecord]) -> Iterator[str]:
    for record in records:
        for modality, reason in record.unserved_modalities.items():
            yield f"{record.instance} serves no {modality}: {reason}"


def _transports(records: Sequence[InstanceRecord], asked: str) -> Iterator[str]:
    for record in records:
        if record.role not in (*PRODUCING_ROLES, *CONSUMING_ROLES) or not record.transports:
            continue
        best = record.transports[0].value
        if record.slab_failure:
            yield f"{record.instance} uses {best}, not cuda_ipc: {record.slab_failure}"
        elif asked not in ("auto", best) or (asked == "auto" and best == Transport.REDIS.value):
            why = f"./triptych logs {record.instance} says why"
            yield f"{record.instance} uses {best}, not {'shared memory' if asked == 'auto' else asked}: {why}"


def _towers(records: Sequence[InstanceRecord], config: ModelConfig) -> Iterator[str]:
    for record in records:
        encodes = record.role in PRODUCING_ROLES or record.role is Role.ENCODE_PREFILL_DECODE
        if encodes and not record.item_limits and not is_text_only(config):
            yield f"{record.instance} encodes nothing: it has loaded no tower for this model"


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
