"""What this instance offers for handing over tensors, as it announces it in the registry."""

from dataclasses import dataclass

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.transports import TransportCapabilities
from triptych_common.protocol.messages import Transport
from triptych_vllm_connector.config import TransportSetting

BEST_FIRST = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)
MAX_FAILURE_CHARS = 300  # as in `InstanceRecord.slab_failure`


class TransportError(TriptychError):
    """The transport that was asked for cannot be used here."""


@dataclass(frozen=True)
class SlabVerdict:
    """Whether this instance's worker has mapped a store's slab and read from it."""

    device: str | None = None  # UUID of its GPU, "GPU-...", as far as it is known
    generation: int | None = None  # of the store that was asked about
    failure: str | None = None  # why not

    @property
    def usable_generation(self) -> int | None:
        return None if self.failure is not None else self.generation


NO_GPU = SlabVerdict(failure="this engine has no GPU of its own")


def ability(setting: TransportSetting, *, slab: SlabVerdict, has_region: bool) -> TransportCapabilities:
    """What this instance offers.

    `slab`: what its worker found; `has_region`: the store's region can be mapped here.

    Raises:
        TransportError: `setting` asks for what this machine does not have.
    """
    possible = {
        Transport.CUDA_IPC: slab.usable_generation is not None,
        Transport.PINNED_SHM: has_region,
        Transport.REDIS: True,
    }
    wanted = BEST_FIRST if setting == "auto" else (Transport(setting),)
    transports = tuple(each for each in wanted if possible[each])
    if not transports:
        lacking = slab.failure if setting == "cuda_ipc" else "the region cannot be mapped"
        raise TransportError(f"transport {setting} cannot be used here: {lacking}")
    return TransportCapabilities(transports, slab.device, slab.usable_generation)
