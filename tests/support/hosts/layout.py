"""What runs on which host."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fabric.fabric_host import transports_option
from tests.support.fast.layout import Layout
from tests.support.hosts.network import Network
from tests.support.protocol_steps import Party

CONTROL = "control"
"""The host with Redis, and nothing else."""

KEY = "of these tests alone, and no secret of anybody"
FABRIC_PORT = 7420


@dataclass(frozen=True)
class Place:
    """What one host has, besides a store and a fabric agent."""

    num_encoders: int = 0
    num_prefill_decodes: int = 0
    num_gateways: int = 0
    clock_ahead_s: float = 0.0


ENCODER_APART = {
    "a": Place(num_encoders=1),
    "b": Place(num_prefill_decodes=1, num_gateways=1, clock_ahead_s=3600.0),
}
"""Two hosts: each request with an image needs both, and their clocks are an hour apart."""


@dataclass(frozen=True)
class HostsLayout(Layout):
    """`places`: by host. An instance's name says its host: `encoder-a-0`, `store-a`, `fabric-a`."""

    places: Mapping[str, Place] = field(default_factory=lambda: ENCODER_APART)
    has_agents: bool = True
    progress_timeout_s: float = 2.0  # after which an agent gives a silent one up

    def names(self) -> dict[Party, list[str]]:
        each = self.places.items()
        return {
            Party.CACHE_STORE: [store_of(host) for host in self.places],
            Party.SOURCE_AGENT: [agent_of(host) for host in self.places if self.has_agents],
            Party.ENCODER: [f"encoder-{host}-{n}" for host, place in each for n in range(place.num_encoders)],
            Party.PREFILL_DECODE: [
                f"prefill_decode-{host}-{n}" for host, place in each for n in range(place.num_prefill_decodes)
            ],
            Party.GATEWAY: [f"gateway-{host}-{n}" for host, place in each for n in range(place.num_gateways)],
        }

    def placed(self, party: Party, name: str, network: Network, key_file: Path) -> list[str]:
        """Options that say where an instance is."""
        host = host_of(name)
        address = network[host].address
        match party:
            case Party.CACHE_STORE:
                return []
            case Party.SOURCE_AGENT:
                return [
                    f"--host-name={host}", f"--fabric-listen-host={address}",
                    f"--fabric-port={FABRIC_PORT}", f"--fabric-key-file={key_file}",
                    f"--fabric-progress-timeout-s={self.progress_timeout_s}", transports_option("tcp"),
                ]  # fmt: skip
            case Party.ENCODER:
                return [f"--host-name={host}"]
            case Party.PREFILL_DECODE:
                return [f"--host-name={host}", f"--address={address}", f"--store={store_of(host)}"]
            case _:
                return [f"--host-name={host}", f"--host={address}"]


def host_of(name: str) -> str:
    """Of an instance."""
    return name.split("-")[1]


def store_of(host: str) -> str:
    return f"store-{host}"


def agent_of(host: str) -> str:
    return f"fabric-{host}"
