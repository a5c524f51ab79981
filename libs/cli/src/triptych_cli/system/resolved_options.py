"""Options of `demo` and `up`, completed for this machine: the input of the topology."""

from dataclasses import dataclass
from typing import Literal

from triptych_cli.roles import TOPOLOGIES, RoleCounts
from triptych_cli.settings import LOOPBACK
from triptych_cli.system.host_plan import HostPlan
from triptych_common.cores.plan import CorePolicy
from triptych_common.protocol.urls import ANY_ADDRESSES

MIB = 1 << 20


@dataclass(frozen=True)
class ResolvedOptions:
    model: str
    model_is_local: bool
    gateway_port: int
    gateway_host: str = LOOPBACK  # on which gateways listen
    counts: RoleCounts = TOPOLOGIES["e+pd"]
    num_gateways: int = 1  # on gateway_port and the ports after it
    redis_url: str | None = None  # None: the embedded server
    deployment: str = "default"
    region_bytes: int = 256 * MIB
    encoder_args: tuple[str, ...] = ()
    prefill_decode_args: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()  # as in CUDA_VISIBLE_DEVICES; empty: engines run on the CPU
    has_mps: bool = False  # a control daemon of NVIDIA's Multi-Process Service is there
    core_policy: CorePolicy = "text_first"
    cores: tuple[int, ...] = ()  # of the CPU, for engines to share; empty: engines keep the user's threads
    local_encode: Literal["off", "fallback", "auto"] | None = None  # None: as the environment says
    slab_share: float = 0.0  # of the first GPU's memory, which the store takes there
    host: HostPlan | None = None  # one of several; None: the only one
    serves_alone: bool = True  # its gateways need no instances of other hosts

    @property
    def reached_gateway_host(self) -> str:
        """Address at which this machine reaches its gateways."""
        return LOOPBACK if self.gateway_host in ANY_ADDRESSES else self.gateway_host

    @property
    def host_name(self) -> str | None:
        """Host part of the instances' names; None for a single host."""
        return self.host.name if self.host else None
