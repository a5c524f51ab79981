"""`FastSystem` on several hosts: a store and a fabric agent on each, and whatever the layout puts there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.fast.processes.machine import Machine
from tests.support.fast.system import FastSystem
from tests.support.hosts.control_redis import ControlRedis, control_redis
from tests.support.hosts.layout import CONTROL, KEY, HostsLayout, host_of
from tests.support.hosts.network import Network
from tests.support.protocol_steps import Party


class HostsSystem(FastSystem):
    """Each host has a run directory of its own; what the test itself looks at needs no network."""

    layout: HostsLayout

    def __init__(self, network: Network, redis_server: ControlRedis, layout: HostsLayout) -> None:
        self.network = network
        self._service_redis_url = redis_server.service_url
        super().__init__(redis_server, layout)

    def run_dir_of(self, name: str) -> Path:
        folder = self.folder / host_of(name)
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    @property
    def gateways(self) -> list[str]:
        return self.names_of(Party.GATEWAY)

    def gateway_urls(self) -> list[str]:
        return [self.url(name) for name in self.gateways]

    def url(self, name: str | None = None) -> str:
        return super().url(name or self.gateways[0])

    def on_host(self, host: str) -> list[str]:
        """The instances there, the store and the agent among them."""
        return [name for name in self.services if host_of(name) == host]

    # ---- inside ----------------------------------------------------------------------------------
    @property
    def _redis_url(self) -> str:
        return self._service_redis_url

    def _machine_of(self, name: str) -> Machine:
        host = host_of(name)
        return Machine(self.network[host].path, self.layout.places[host].clock_ahead_s)

    def _address_of(self, name: str) -> str:
        return str(self.network[host_of(name)].address)

    def _placed(self, party: Party, name: str) -> list[str]:
        key_file = self.folder / "fabric.key"
        if not key_file.exists():
            key_file.touch(mode=0o600)
            key_file.write_text(KEY)
        return self.layout.placed(party, name, self.network, key_file)


@contextmanager
def running_hosts(layout: HostsLayout) -> Iterator[HostsSystem]:
    """Everything runs, on hosts of its own; gone at the end."""
    with (
        Network([*layout.places, CONTROL]) as network,
        control_redis(network[CONTROL]) as server,
        HostsSystem(network, server, layout) as system,
    ):
        yield system
