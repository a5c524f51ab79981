"""Plan of one host of several: its name, address and ports. Pure.

fabric_port        fabric agent
fabric_port + 1 …  gateways (media, for encoders), then language models, then their KV side channels
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HOST_VARIABLE = "TRIPTYCH_HOST_NAME"
NUM_PORTS_LIMIT = 1 << 16


@dataclass(frozen=True)
class HostPlan:
    name: str
    address: str  # at which the other hosts reach this machine
    fabric_port: int
    key_file: Path | None  # shared by all agents; None: certificates only
    redis_port: int | None  # of the embedded Redis; None: Redis is elsewhere

    @property
    def store(self) -> str:
        """Name of the host's cache_store."""
        return f"store-{self.name}"

    @property
    def agent(self) -> str:
        """Name of the host's fabric agent."""
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
