"""Which transport a producer and its consumers use. Pure.

An entry lies in one memory, whoever reads it: the choice is the best that the producer and every consumer
of its namespace can do, as they announce it in the registry.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych_common.protocol.messages import InstanceRecord, Role, Transport
from triptych_common.protocol.store import REDIS, SHM, SlabInfo, device_memory

PRODUCING_ROLES = (Role.ENCODE, Role.ENCODE_PREFILL)
CONSUMING_ROLES = (Role.PREFILL, Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE)


@dataclass(frozen=True)
class Ability:
    """What one instance offers: transports, best first, and the GPU that `cuda_ipc` is for."""

    transports: tuple[Transport, ...]
    device: str | None = None  # "GPU-..."

    @classmethod
    def announced(cls, record: InstanceRecord) -> "Ability":
        """Of another instance; one that announces nothing knows the region only."""
        return cls(record.transports or (Transport.PINNED_SHM,), record.device)


@dataclass(frozen=True)
class Pair:
    """A producer, a consumer that may want its tensors, and how these travel between them now."""

    producer: str  # instances
    consumer: str
    transport: Transport


def choose_memories(producer: Ability, consumers: Iterable[Ability], slab: SlabInfo | None) -> list[str]:
    """Where the producer may put a tensor, best first; never empty."""
    slab_memory = None if slab is None else slab.memory
    able = list(consumers)
    memories = [
        _memory(each, slab_memory)
        for each in producer.transports
        if all(each in consumer.transports for consumer in able)
        and (each is not Transport.CUDA_IPC or _share_device(slab_memory, [producer, *able]))
    ]
    if SHM in memories and REDIS in memories:
        memories.remove(REDIS)  # it takes blocks of the region as well: no way out when that is full
    # Nothing in common: whoever cannot read it has the entry made again, and says so.
    return memories or [_memory(producer.transports[-1], slab_memory)]


def choose_pairs(records: Iterable[InstanceRecord], slab: SlabInfo | None) -> list[Pair]:
    """Every producer and consumer of one namespace, as each producer chooses now."""
    known = list(records)
    pairs = []
    for producer in (each for each in known if each.role in PRODUCING_ROLES):
        consumers = consumers_of(producer.namespace_digest, known)
        memory = choose_memories(
            Ability.announced(producer), [Ability.announced(each) for each in consumers], slab
        )[0]
        pairs += [Pair(producer.instance, each.instance, transport_of(memory)) for each in consumers]
    return pairs


def consumers_of(namespace_digest: str | None, records: Iterable[InstanceRecord]) -> list[InstanceRecord]:
    """Who may want tensors of this namespace."""
    return [
        each for each in records if each.role in CONSUMING_ROLES and each.namespace_digest == namespace_digest
    ]


def transport_of(memory: str) -> Transport:
    """By which transport a tensor in `memory` comes."""
    return {SHM: Transport.PINNED_SHM, REDIS: Transport.REDIS}.get(memory, Transport.CUDA_IPC)


def _memory(transport: Transport, slab_memory: str | None) -> str:
    if transport is Transport.CUDA_IPC:
        return slab_memory or SHM
    return REDIS if transport is Transport.REDIS else SHM


def _share_device(slab_memory: str | None, all_of: Sequence[Ability]) -> bool:
    return slab_memory is not None and all(
        each.device is not None and device_memory(each.device) == slab_memory for each in all_of
    )
