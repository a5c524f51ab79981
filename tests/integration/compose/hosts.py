"""Two projects of compose.host.yaml on one Docker engine, as two hosts.

Each project has a Docker network of its own, and Docker lets nothing pass between two networks: what the
projects have of each other is what they publish at their hosts' addresses. Such an address must be one of the
machine's, since Docker listens there, and be reached by containers of any network, which those of the
loopback interface are not. The bridge of a Docker network has one: so each host is given a network with
nothing in it, for its address alone. That needs no rights but Docker's, takes an address that nothing else on
the machine has, and is gone with the network.
"""

import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.compose.project import Compose, docker
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_trace

USER = "10001"  # of all our containers
TRACES = "/var/lib/triptych/traces"
READ_TRACES = f"cat {TRACES}/*.jsonl"


@dataclass(frozen=True)
class HostProjects:
    """Host `a`, the first one, encodes; the language model is on host `b`."""

    first: Compose
    second: Compose
    key: Path  # of the agents
    other_key: Path  # which fits none of them

    def start(self) -> None:
        """Gateways are healthy once a language model is there, and that one needs the first host's Redis."""
        self.first.up("redis", "encoder")
        self.second.up("--scale", "encoder=0")
        self.first.up("gateway")

    def replace_second_agent(self, key: Path) -> None:
        """By one with this key."""
        self.second.env["TRIPTYCH_FABRIC_KEY_FILE"] = str(key)
        self.second.up("--no-build", "--no-deps", "--force-recreate", "fabric")

    def trace(self, request_id: str) -> list[SpanRecord]:
        """The spans of a request, as far as they are in the volumes of both hosts by now."""
        with tempfile.TemporaryDirectory() as folder:
            for host in (self.first, self.second):
                read = host.execute("fabric", "sh", "-c", READ_TRACES)
                assert read.returncode == 0, read.stderr
                (Path(folder) / f"{host.project}.jsonl").write_text(read.stdout)
            return read_trace(Path(folder), request_id)

    def trace_files(self) -> str:
        """What lies in the volumes with traces, for the message of a failure."""
        listed = (
            (host.project, host.execute("fabric", "ls", "-lan", TRACES)) for host in (self.first, self.second)
        )
        return "\n".join(f"{project}:\n{each.stdout}{each.stderr}" for project, each in listed)

    def status(self) -> dict[str, Any]:
        """All hosts and their links, as the second host says."""
        said = self.second.execute("prefill_decode", "triptych", "status", "--json")
        assert said.returncode == 0, said.stdout + said.stderr
        found: dict[str, Any] = json.loads(said.stdout)
        return found

    def link(self) -> dict[str, Any]:
        """From the first host's store to the second's; empty: none is known."""
        wanted = {"source": "store-a", "target": "store-b"}
        return next((each for each in self.status()["links"] if wanted.items() <= each.items()), {})

    def num_entries(self) -> int:
        """In the second host's store, as of its agent's last heartbeat."""
        (stores,) = [each["stores"] for each in self.status()["hosts"] if each["host"] == "b"]
        return sum(each.get("num_entries", 0) for each in stores)


@contextlib.contextmanager
def host_address(name: str) -> Iterator[str]:
    """An address of this machine that containers of all networks reach."""
    docker("network", "create", name)
    try:
        (network,) = json.loads(docker("network", "inspect", name))
        address = str(network["IPAM"]["Config"][0]["Gateway"])
        with socket.socket() as probe:
            try:
                probe.bind((address, 0))
            except OSError as error:
                pytest.skip(f"Docker's networks have no addresses on this machine: {address}: {error}")
        yield address
    finally:
        docker("network", "rm", name)


def host_environment(name: str, address: str, first_address: str, password: str, key: Path) -> dict[str, str]:
    """What a host's `.env` has."""
    return {
        "COMPOSE_FILE": "compose.host.yaml",
        "TRIPTYCH_HOST_NAME": name,
        "TRIPTYCH_HOST_ADDRESS": address,
        "TRIPTYCH_REDIS_HOST": first_address,
        "TRIPTYCH_REDIS_PASSWORD": password,
        "TRIPTYCH_REDIS_URL": "",
        "TRIPTYCH_FABRIC_KEY_FILE": str(key),
    }


def write_keys(*files: Path) -> None:
    """Keys that the agents' user alone can read: a container sees the owner and the mode that they have here.

    The image of the agents gives them away, which only root can. All are in one folder.
    """
    for file in files:
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32))
    image = f"{os.environ.get('TRIPTYCH_IMAGES') or 'triptych'}-cache_store"
    mount = f"{files[0].parent}:/keys"
    names = [f"/keys/{file.name}" for file in files]
    docker("run", "--rm", "--network=none", "--user=0", "--volume", mount, image, "chown", USER, *names)
