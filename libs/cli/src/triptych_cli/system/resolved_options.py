"""Options of `demo` and `up`, completed for this machine, and the plan of one host of several. Pure.

fabric_port        fabric agent
fabric_port + 1 …  gateways (media, for encoders), then language models, then their KV side channels
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from triptych_cli.roles import TOPOLOGIES, Bounds, RoleCounts, stage_of
from triptych_cli.settings import LOOPBACK
from triptych_common.cores.plan import CorePolicy
from triptych_common.protocol.urls import ANY_ADDRESSES

HOST_VARIABLE = "TRIPTYCH_HOST_NAME"
NUM_PORTS_LIMIT = 1 << 16
MIB = 1 << 20


@dataclass(frozen=True)
class HostPlan:
    name: str
    address: str  # at which the other hosts reach this machine
    fabric_port: int
    key_file: Path | None  # shared by all agents; None: certificates only
    redis_port: int | None  # of the embedded Redis; None: Redis is elsewhere

    @property
    def store(self) -> str:
        return f"store-{self.name}"

    @property
    def agent(self) -> str:
        return f"fabric-{self.name}"

    def ports(self, num_gateways: int, num_language_models: int, num_handing_over: int) -> "HostPorts":
        """Ports after the agent's, for services that other hosts reach."""
        first_model = self.fabric_port + 1 + num_gateways
        first_kv = first_model + num_language_models
        return HostPorts(
            tuple(range(self.fabric_port + 1, first_model)),
            tuple(range(first_model, first_kv)),
            tuple(range(first_kv, first_kv + num_handing_over)),
        )

    def agent_environment(self) -> Mapping[str, str]:
        """Environment of the agent: its addresses, its port, its key."""
        key = {"TRIPTYCH_FABRIC_KEY_FILE": str(self.key_file)} if self.key_file else {}
        return {
            "TRIPTYCH_FABRIC_LISTEN_HOST": self.address,
            "TRIPTYCH_FABRIC_ADVERTISE_HOST": self.address,
            "TRIPTYCH_FABRIC_PORT": str(self.fabric_port),
            **key,
        }

    def gateway_environment(self, port: int) -> Mapping[str, str]:
        """Environment of a gateway with a second port, where encoders of other hosts get media."""
        return {"TRIPTYCH_INTERNAL_HOST": self.address, "TRIPTYCH_INTERNAL_PORT": str(port)}


@dataclass(frozen=True)
class HostPorts:
    gateways: tuple[int, ...]
    language_models: tuple[int, ...]
    kv: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        return (*self.gateways, *self.language_models, *self.kv)


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
    slab_bytes: int = 0  # of the first GPU's memory, which the store takes there; 0: none
    slab_share: float = 0.0  # the same as a share
    host: HostPlan | None = None  # one of several; None: the only one
    min_encoders: int | None = None  # fewest; None: all of `counts`, so that they are not scaled
    min_prefill_decodes: int | None = None  # fewest; None: all of `counts`
    serves_alone: bool = True  # its gateways need no instances of other hosts

    def bounds(self) -> dict[str, Bounds]:
        """Return the fewest and most engines of each stage that is planned."""
        numbers = Counter(stage_of(role) for role, _ in self.counts.language_models())
        numbers["encoder"] = self.counts.encoders
        fewest = {"encoder": self.min_encoders, "prefill_decode": self.min_prefill_decodes}
        return {
            stage: Bounds(number if (low := fewest.get(stage)) is None else low, number)
            for stage, number in numbers.items()
        }

    @property
    def scales_encoders(self) -> bool:
        return self.bounds()["encoder"].is_range

    @property
    def reached_gateway_host(self) -> str:
        """Address at which this machine reaches its gateways."""
        return LOOPBACK if self.gateway_host in ANY_ADDRESSES else self.gateway_host

    @property
    def host_name(self) -> str | None:
        """Host part of the instances' names; None for a single host."""
        return self.host.name if self.host else None
