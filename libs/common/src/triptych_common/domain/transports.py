"""Choice of the transport between a producer and its consumers. Pure.

An entry lies in one memory for all its readers: the choice is the best that the producer and every consumer
of its namespace can do, as they announce it in the registry. Between stores entries go from region to region
(docs/design/fabric.md), so a slab is chosen only where all of them have one store.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych_common.protocol.messages import InstanceRecord, Role, Transport
from triptych_common.protocol.store import REDIS, SHM, Welcome, device_memory

PRODUCING_ROLES = (Role.ENCODE, Role.ENCODE_PREFILL)
CONSUMING_ROLES = (Role.PREFILL, Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE)


@dataclass(frozen=True)
class StoreSlab:
    memory: str  # "cuda:GPU-..."
    generation: int

    @classmethod
    def of_welcome(cls, welcome: Welcome) -> "StoreSlab | None":
        """Return the slab that `welcome` announces; None without device memory."""
        return None if welcome.slab is None else cls(welcome.slab.memory, welcome.generation)


@dataclass(frozen=True)
class TransportCapabilities:
    """Transports that one instance offers, best first, and its slab for `cuda_ipc`."""

    transports: tuple[Transport, ...]
    device: str | None = None  # "GPU-..."
    slab_generation: int | None = None  # of the store whose slab it has mapped and read
    store: str | None = None  # store that it works with; None: not announced

    @classmethod
    def announced(cls, record: InstanceRecord) -> "TransportCapabilities":
        """Return what another instance announced; without an announcement, shared memory only."""
        transports = record.transports or (Transport.PINNED_SHM,)
        return cls(transports, record.device, record.slab_generation, record.store)


@dataclass(frozen=True)
class Pair:
    """A producer, a consumer of its tensors, and the transport between them now."""

    producer: str  # instances
    consumer: str
    transport: Transport
    slab_failure: str | None = None  # why one of the two cannot use the store's slab


def choose_memories(
    producer: TransportCapabilities, consumers: Iterable[TransportCapabilities], slab: StoreSlab | None
) -> list[str]:
    """Return where the producer may put a tensor, best first; never empty."""
    slab_memory = None if slab is None else slab.memory
    able = list(consumers)
    memories = [
        _memory(each, slab_memory)
        for each in producer.transports
        if all(each in consumer.transports for consumer in able)
        and (each is not Transport.CUDA_IPC or _share_slab(slab, [producer, *able]))
    ]
    if SHM in memories and REDIS in memories:
        memories.remove(REDIS)  # it takes blocks of the region as well: no way out when that is full
    # Nothing in common: an instance that cannot read it has the entry made again, and logs it.
    return memories or [
        _memory(producer.transports[-1], None if _are_apart(producer, *able) else slab_memory)
    ]


def choose_pairs(records: Iterable[InstanceRecord], slab: StoreSlab | None) -> list[Pair]:
    """Return every producer and consumer of one namespace with the transport each producer chooses now."""
    known = list(records)
    pairs = []
    for producer in (each for each in known if each.role in PRODUCING_ROLES):
        consumers = consumers_of(producer.namespace_digest, known)
        memory = choose_memories(
            TransportCapabilities.announced(producer),
            [TransportCapabilities.announced(each) for each in consumers],
            slab,
        )[0]
        pairs += [
            Pair(
                producer.instance,
                each.instance,
                transport_of(memory),
                producer.slab_failure or each.slab_failure or _another_store(producer, consumers),
            )
            for each in consumers
        ]
    return pairs


def consumers_of(namespace_digest: str | None, records: Iterable[InstanceRecord]) -> list[InstanceRecord]:
    return [
        each for each in records if each.role in CONSUMING_ROLES and each.namespace_digest == namespace_digest
    ]


def transport_of(memory: str) -> Transport:
    return {SHM: Transport.PINNED_SHM, REDIS: Transport.REDIS}.get(memory, Transport.CUDA_IPC)


def _are_apart(*all_of: TransportCapabilities) -> bool:
    """Return whether the instances use different stores; one without a store counts as using the others'."""
    return len({each.store for each in all_of if each.store is not None}) > 1


def _another_store(producer: InstanceRecord, consumers: Iterable[InstanceRecord]) -> str | None:
    """Return why another store keeps a producer from its slab, or None."""
    if Transport.CUDA_IPC not in producer.transports or producer.store is None:
        return None
    far = next((each for each in consumers if each.store not in (None, producer.store)), None)
    return None if far is None else f"{far.instance} has another store"


def _memory(transport: Transport, slab_memory: str | None) -> str:
    if transport is Transport.CUDA_IPC:
        return slab_memory or SHM
    return REDIS if transport is Transport.REDIS else SHM


def _share_slab(slab: StoreSlab | None, all_of: Sequence[TransportCapabilities]) -> bool:
    """Return whether all of them mapped and read this slab; an earlier store's slab does not count."""
    if slab is None or _are_apart(*all_of):
        return False
    return all(
        each.device is not None
        and device_memory(each.device) == slab.memory
        and each.slab_generation == slab.generation
        for each in all_of
    )
