"""Two hosts whose agents show certificates, by the command line, on networks of their own: what `up` passes
to the agents is enough for a request that needs both. Real Redis, stores, agents and gateway; engines are
stand-ins.
"""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fabric.authority import Authority
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import DEPLOYMENT, port_to_listen_at
from tests.support.fast.processes.forkserver import ServiceProcess
from tests.support.fast.processes.machine import Machine
from tests.support.fast.processes.points import SEEN
from tests.support.fast.processes.tensors import png
from tests.support.hosts.command_line import NO_ENGINES, CommandLine, command_lines
from tests.support.hosts.layout import FABRIC_PORT, HostsLayout, Place, host_of
from tests.support.hosts.namespaces import require_namespaces
from tests.support.hosts.network import Network
from tests.support.protocol_steps import Party
from tests.support.waiting import free_port, wait_until

LAYOUT = HostsLayout(places={"a": Place(num_encoders=1), "b": Place(num_prefill_decodes=1)})
ENCODER, PREFILL_DECODE = "encoder-a-0", "prefill_decode-b-0"
LIMIT_S = 90.0

pytestmark = [pytest.mark.slow, pytest.mark.long]


class TwoHosts:
    """Host a has Redis, the gateway and an encoder, host b the prefill_decode: an image needs both."""

    def __init__(self, network: Network, first: CommandLine, second: CommandLine) -> None:
        self.folder = first.run_dir.parent
        self.authority = Authority(self.folder, "fabric")
        self.first = self._on(network, first, self.authority)
        self.second = self._on(network, second, self.authority)
        self._network = network
        self._gateway_port = free_port()
        self._tally = self.folder / "encodes"
        self._tally.touch()
        (self.folder / SEEN).mkdir()

    def up_first(self) -> str:
        address = self._network["a"].address
        return self.first(
            "up", "--fabric", f"--fabric-host={address}", "--host=a", f"--port={self._gateway_port}",
            *NO_ENGINES,
        )  # fmt: skip

    def up_second(self) -> str:
        """As a user would: the folder of the first host is copied."""
        join = self.folder / "join"
        shutil.rmtree(join, ignore_errors=True)
        shutil.copytree(self.first.join_dir, join)
        return self.second("up", f"--join={join}", "--host=b", *NO_ENGINES)

    def show_certificates_of(self, other: Authority) -> None:
        """The second host from now on; it trusts whom it trusted."""
        variables = {"TRIPTYCH_DEPLOYMENT": DEPLOYMENT, **other.environment("b", ca=self.authority.ca_file)}
        self.second = replace(self.second, variables=variables)

    @contextmanager
    def engine(self, party: Party, name: str) -> Iterator[None]:
        """A stand-in beside the store of its host, until the block ends."""
        host = self.first if host_of(name) == "a" else self.second
        url = (self.first.join_dir / "redis-url").read_text().strip()
        arguments = LAYOUT.arguments(
            party, name, redis_url=url, folder=host.run_dir, tally=self._tally,
            ports={PREFILL_DECODE: port_to_listen_at()},
        )  # fmt: skip
        arguments += LAYOUT.placed(party, name, self._network, Path())
        machine = Machine(self._network[host_of(name)].path)
        process = ServiceProcess(party, name, arguments, self.folder, machine)
        process.start()
        try:
            wait_until(lambda: name in self._known(), LIMIT_S, f"the gateway knows {name}")
            yield
        finally:
            process.end()

    def _known(self) -> set[str]:
        """Instances that the gateway knows; it says so at the port that other hosts reach."""
        url = f"http://{self._network['a'].address}:{FABRIC_PORT + 1}/health/ready"
        report = httpx.get(url, timeout=60.0, trust_env=False).json()
        return {each["instance"] for each in report["instances"]}

    def ask(self, number: int) -> Answer:
        """At the gateway, which listens on its host alone."""

        async def ask() -> Answer:
            async with Client(f"http://127.0.0.1:{self._gateway_port}", LIMIT_S) as client:
                return await client.ask(Question(f"question {number}", (png(number),)))

        return self._network["a"].call(lambda: asyncio.run(ask()))

    def link(self) -> dict[str, Any]:
        """From a to b, as the status of either host shows it."""
        (found,) = [each for each in self.second.status()["links"] if each["source"] == "store-a"]
        return dict(found)

    def _on(self, network: Network, host: CommandLine, authority: Authority) -> CommandLine:
        name = host.run_dir.name
        variables = {"TRIPTYCH_DEPLOYMENT": DEPLOYMENT, **authority.environment(name)}
        return replace(host, machine=network[name], variables=variables)


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    require_namespaces()
    with ExitStack() as stack:
        network = stack.enter_context(Network(["a", "b"]))
        first, second = stack.enter_context(command_lines("a", "b"))
        yield TwoHosts(network, first, second)


def test_an_image_goes_to_a_host_with_a_certificate_and_to_no_other(hosts: TwoHosts) -> None:
    shown = hosts.up_first()
    assert "Agents show certificates here" in shown
    assert [each.name for each in hosts.first.join_dir.iterdir()] == ["redis-url"], "there is no key"
    hosts.up_second()
    with hosts.engine(Party.ENCODER, ENCODER):
        with hosts.engine(Party.PREFILL_DECODE, PREFILL_DECODE):
            answer = hosts.ask(1)
            assert answer.is_right, answer.whole()
            wait_until(lambda: hosts.link()["num_bytes"] > 0, LIMIT_S, "the status shows what was sent")
            assert (hosts.link()["is_up"], hosts.link()["failure"]) == (True, None)
        hosts.second("down")

        hosts.show_certificates_of(Authority(hosts.folder, "stranger"))
        hosts.up_second()
        with hosts.engine(Party.PREFILL_DECODE, PREFILL_DECODE):
            answer = hosts.ask(2)
            assert (answer.status, answer.code) == (503, "transfer_failed"), answer.whole()
            wait_until(lambda: hosts.link()["failure"] == "refused", LIMIT_S, "the status shows the refusal")
            assert not hosts.link()["is_up"]
            assert "refused" in hosts.first("status", code=None)
            for host, agent, line, why in (
                (hosts.first, "fabric-a", "fabric target not reached", "its certificate is not trusted here"),
                (hosts.second, "fabric-b", "fabric peer cut off", "it does not trust our certificate"),
            ):
                (*_, last) = [each for each in host("logs", agent).splitlines() if line in each]
                assert why in last
