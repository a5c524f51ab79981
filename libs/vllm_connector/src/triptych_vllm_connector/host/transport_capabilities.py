"""What this instance offers for handing over tensors, as it announces it in the registry. Pure."""

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.transports import TransportCapabilities
from triptych_common.protocol.messages import Transport
from triptych_vllm_connector.config import TransportSetting
from triptych_vllm_connector.slab_probe import SlabProbeResult

BEST_FIRST = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)


class TransportError(TriptychError):
    """The transport that was asked for cannot be used here."""


def announced_capabilities(
    setting: TransportSetting, *, slab: SlabProbeResult, has_region: bool
) -> TransportCapabilities:
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
    asked_for = BEST_FIRST if setting == "auto" else (Transport(setting),)
    transports = tuple(each for each in asked_for if possible[each])
    if not transports:
        lacking = slab.failure if setting == "cuda_ipc" else "the region cannot be mapped"
        raise TransportError(f"transport {setting} cannot be used here: {lacking}")
    return TransportCapabilities(transports, slab.device, slab.usable_generation)
