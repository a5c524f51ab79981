"""What this instance offers for handing over tensors, as it announces it in the registry."""

from triptych_common.domain.errors import TriptychError
from triptych_common.domain.transports import Ability
from triptych_common.protocol.messages import Transport
from triptych_vllm_connector.config import TransportSetting

BEST_FIRST = (Transport.CUDA_IPC, Transport.PINNED_SHM, Transport.REDIS)


class TransportError(TriptychError):
    """The transport that was asked for cannot be used here."""


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
