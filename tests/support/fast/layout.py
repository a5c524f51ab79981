"""How a system of a test is laid out: how many of each service, and their options."""

import contextlib
import random
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.fast.processes.tensors import MODEL
from tests.support.protocol_steps import Party
from triptych_cli.roles import instance_name
from triptych_common.protocol.messages import Role

DEPLOYMENT = "fast"
LOOPBACK = "127.0.0.1"
PORTS = range(12_000, 22_000)  # below those that the kernel gives to connections: ours must survive a restart


@dataclass(frozen=True)
class Layout:
    """How many of each, and the options of each kind of service and of single ones."""

    num_encoders: int = 2
    num_prefill_decodes: int = 2
    num_gateways: int = 1
    num_prefills: int = 0  # instances that only prefill
    num_decodes: int = 0  # and those that only decode
    num_encode_prefills: int = 0  # instances that prefill, and encode media themselves
    num_encode_prefill_decodes: int = 0  # and those that do it all
    lease_s: float = 1.0  # of a KV cache that nobody asks for
    takeover_idle_ms: int = 500
    encode_s: float = 0.12
    num_pieces: int = 1  # of an item, in the store
    token_s: float = 0.002
    budget_embeds: int = 600
    region_bytes: int = 8 << 20
    first_token_timeout_s: float = 10.0
    drain_timeout_s: float = 5.0
    options: dict[Party, tuple[str, ...]] = field(default_factory=dict)
    own_options: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of single instances, by name

    def names(self) -> dict[Party, list[str]]:
        """Of the instances, by party, in the order of their start."""
        return {
            Party.CACHE_STORE: ["cache_store"],
            Party.ENCODER: [f"encoder-{n}" for n in range(self.num_encoders)],
            Party.PREFILL_DECODE: [
                *_names(Role.PREFILL_DECODE, self.num_prefill_decodes),
                *_names(Role.ENCODE_PREFILL_DECODE, self.num_encode_prefill_decodes),
            ],
            Party.PREFILL: [
                *_names(Role.PREFILL, self.num_prefills),
                *_names(Role.ENCODE_PREFILL, self.num_encode_prefills),
            ],
            Party.DECODE: _names(Role.DECODE, self.num_decodes),
            Party.GATEWAY: [f"gateway-{n}" for n in range(self.num_gateways)],
        }

    def arguments(
        self, party: Party, name: str, *, redis_url: str, folder: Path, tally: Path, ports: Mapping[str, int]
    ) -> list[str]:
        """The command line of one instance. `ports`: of those with an HTTP server."""
        common = [
            f"--redis-url={redis_url}", f"--deployment={DEPLOYMENT}", f"--run-dir={folder}",
            f"--instance={name}", f"--drain-timeout-s={self.drain_timeout_s}",
        ]  # fmt: skip
        own = self._own(party, name, tally, ports.get(name, 0))
        return [*common, *own, *self.options.get(party, ()), *self.own_options.get(name, ())]

    def _own(self, party: Party, name: str, tally: Path, port: int) -> list[str]:
        match party:
            case Party.CACHE_STORE:
                return [f"--region-bytes={self.region_bytes}", "--block-bytes=4096"]
            case Party.ENCODER:
                return [
                    f"--model={MODEL}", f"--takeover-idle-ms={self.takeover_idle_ms}",
                    f"--encode-s={self.encode_s}", f"--tally={tally}", f"--num-pieces={self.num_pieces}",
                ]  # fmt: skip
            case Party.PREFILL_DECODE | Party.PREFILL:
                return [
                    f"--port={port}", f"--budget-embeds={self.budget_embeds}", f"--token-s={self.token_s}",
                    f"--role={_role_of(name)}", f"--lease-s={self.lease_s}", f"--encode-s={self.encode_s}",
                    f"--tally={tally}",
                ]  # fmt: skip
            case Party.SOURCE_AGENT:
                return []
            case Party.DECODE:
                return [
                    f"--port={port}", f"--token-s={self.token_s}", f"--lease-s={self.lease_s}",
                    f"--tally={tally}",
                ]  # fmt: skip
            case _:
                return [
                    f"--port={port}", "--registry-interval-s=0.1", "--inline-media-bytes=300",
                    f"--first-token-timeout-s={self.first_token_timeout_s}",
                    "--resend-to-last-instance",  # what ends instances here is no request
                ]  # fmt: skip


def kind_of(name: str) -> str:
    """`encode_prefill` of `encode_prefill-0`, and of `encode_prefill-b-0` on host b."""
    return name.partition("-")[0]


def _names(role: Role, count: int) -> list[str]:
    return [instance_name(role, number) for number in range(count)]


def _role_of(name: str) -> Role:
    return Role(kind_of(name).replace("_", "-"))


def port_to_listen_at() -> int:
    """A port without a listener, which no connection gets while its owner is dead."""
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise RuntimeError("every port is taken")
