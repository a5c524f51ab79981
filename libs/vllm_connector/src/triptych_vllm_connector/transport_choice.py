"""Which transport a producer and its consumers use. Pure.

An entry lies in one memory, whoever reads it: the choice is the best that the producer and every consumer
of its namespace can do, as they announce it in the registry.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role, Transport
from triptych_common.protocol.store import REDIS, SHM, SlabInfo, device_memory
from triptych_vllm_connector.config import TransportSetting

CONSUMING_ROLES = (Role.PREFILL, Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE)
BEST_FIRST = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)


class TransportError(TriptychError):
    """The transport that was asked for cannot be used here."""


@dataclass(frozen=True)
class Ability:
    """What one instance offers: transports, best first, and the GPU that `cuda_ipc` is for."""

    transports: tuple[Transport, ...]
    device: str | None = None  # "GPU-..."

    @classmethod
    def announced(cls, record: InstanceRecord) -> "Ability":
        """Of another instance; one that announces nothing knows the region only."""
        return cls(record.transports or (Transport.PINNED_SHM,), record.device)


def ability(setting: TransportSetting, *, device: str | None, has_region: bool) -> Ability:
    """What this instance offers.

    `device`: UUID of its GPU; `has_region`: the store's region can be mapped here.

    Raises:
        TransportError: `setting` asks for what this machine does not have.
    """
    possible = {
        Transport.CUDA_IPC: device is not None,
        Transport.PINNED_SHM: has_region,
        Transport.REDIS: True,
    }
    wanted = BEST_FIRST if setting == "auto" else (Transport(setting),)
    transports = tuple(each for each in wanted if possible[each])
    if not transports:
        lacking = "a GPU" if setting == "cuda_ipc" else "a region that can be mapped"
        raise TransportError(f"transport {setting} needs {lacking}")
    return Ability(transports, device)


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
