"""Hosts on one network: namespaces with an interface each, on a bridge in a namespace of its own.

    host a                  hub                   host b
    eth0 ◀──veth──▶ port ──▶ bridge ◀── port ◀──veth──▶ eth0
                              ▲
                              └── port ◀──veth──▶ this machine's own interface: where the test is

A host's rate counts in both directions, as a network card's does. Losses and cuts are of a direction from one
host to another. The test's own interface has neither.
"""

import contextlib
import itertools
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from tests.support.hosts.namespaces import CommandFailedError, Namespace, run_here

Instruction = tuple[int, int, int, int]

_LOAD_HALF, _LOAD_WORD = 0x28, 0x20  # BPF_LD | BPF_ABS, of 16 and of 32 bits
_IF_EQUAL, _IF_GREATER = 0x15, 0x25  # BPF_JMP | BPF_JEQ, BPF_JMP | BPF_JGT
_RETURN = 0x06
_TYPE_AT, _IPV4, _DESTINATION_AT = 12, 0x0800, 30  # in an Ethernet frame
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: another number each time it is loaded
_PASS: Instruction = (_RETURN, 0, 0, 0)  # TC_ACT_OK
_DROP: Instruction = (_RETURN, 0, 0, 2)  # TC_ACT_SHOT


def loss_program(losses: Mapping[IPv4Address, float]) -> str:
    """The bytecode.

    Args:
        losses: probability by destination, 0 to 1.
    """
    program: list[Instruction] = [(_LOAD_HALF, 0, 0, _TYPE_AT), (_IF_EQUAL, 1, 0, _IPV4), _PASS]
    for destination, probability in losses.items():
        program += [
            (_LOAD_WORD, 0, 0, _DESTINATION_AT),
            (_IF_EQUAL, 0, 4, int(destination)),  # else to the next destination
            (_LOAD_WORD, 0, 0, _RANDOM),
            (_IF_GREATER, 0, 1, _threshold(probability)),
            _PASS,
            _DROP,
        ]
    program.append(_PASS)
    return ",".join([str(len(program)), *(" ".join(map(str, each)) for each in program)])


def _threshold(probability: float) -> int:
    """A random number above it passes."""
    if probability >= 1:
        return 2**32 - 1
    return int(probability * 2**32)


NETWORKS = [IPv4Network(f"10.213.{number}.0/24") for number in range(256)]
OWN_NUMBER = 254  # of the test's own address
MOST_SEGMENTS = 65_535  # of a packet that the kernel divides later: its default
BURST_BYTES = 256 << 10
QUEUE_S = 0.05  # how long a packet may wait for its turn, before it is lost
MIN_QUEUE_BYTES = 1 << 20

T = TypeVar("T")
_numbers = itertools.count(1)


class Host:
    """A machine, as far as its network goes: processes see its own interfaces, and the common files."""

    def __init__(self, name: str, address: IPv4Address, namespace: Namespace, port: str) -> None:
        self.name = name
        self.address = address
        self.port = port  # its end of the cable at the hub
        self.namespace = namespace

    @property
    def path(self) -> str:
        """Where a process of this machine enters it (`enter_namespace`)."""
        return self.namespace.path

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done here: its sockets and processes are of this host."""
        return self.namespace.call(work)

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "Popen[bytes]":
        """A process here; its output goes to `log`. `env` None: the test's own."""
        return self.namespace.start(command, log, env)


class Network:
    """See the module's docstring."""

    def __init__(self, names: Iterable[str]) -> None:
        self._undo = ExitStack()
        self._losses: dict[tuple[str, str], float] = {}  # from, to
        try:
            self._network = self._undo.enter_context(_own_network())
            self._hub = self._namespace("hub")
            self._hub.run("ip", "link", "add", "bridge", "type", "bridge")
            self._hub.run("ip", "link", "set", "bridge", "up")
            self.hosts = {name: self._add(name, number) for number, name in enumerate(names, 1)}
            self._add_own_interface()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._undo.close()

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    # ---- links -----------------------------------------------------------------------------------
    def set_rate(self, name: str, bits_per_s: int | None) -> None:
        """Of a host, in each direction. None: as fast as this machine is."""
        host = self.hosts[name]
        for namespace, device in ((host.namespace, "eth0"), (self._hub, host.port)):
            if bits_per_s is None:
                with contextlib.suppress(CommandFailedError):  # there was none
                    namespace.run("tc", "qdisc", "del", "dev", device, "root")
                continue
            queue = max(int(bits_per_s / 8 * QUEUE_S), MIN_QUEUE_BYTES)
            shape = ("rate", f"{bits_per_s}bit", "burst", str(BURST_BYTES), "limit", str(queue))
            namespace.run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *shape)

    def set_loss(self, source: str, target: str, probability: float) -> None:
        """Of packets from `source` to `target`, in this direction alone; 0 ends it."""
        self._losses[source, target] = probability
        losses = {
            self.hosts[to].address: each
            for (origin, to), each in self._losses.items()
            if origin == source and each
        }
        self._filter(self.hosts[source], losses)

    def cut(self, source: str, target: str, *, both_ways: bool = True) -> None:
        """Nothing arrives any more; no one is told."""
        self.set_loss(source, target, 1.0)
        if both_ways:
            self.set_loss(target, source, 1.0)

    def mend(self, source: str, target: str) -> None:
        """In both directions."""
        self.set_loss(source, target, 0.0)
        self.set_loss(target, source, 0.0)

    def mend_all(self) -> None:
        """No losses and no rates, anywhere."""
        self._losses.clear()
        for host in self.hosts.values():
            self._filter(host, {})
            self.set_rate(host.name, None)

    @contextmanager
    def lossy(self, first: str, second: str, probability: float) -> Iterator[None]:
        """In both directions, until the block ends. 1: cut."""
        try:
            self.set_loss(first, second, probability)
            self.set_loss(second, first, probability)
            yield
        finally:
            self.mend(first, second)

    @contextmanager
    def slow(self, name: str, bits_per_s: int) -> Iterator[None]:
        """Until the block ends."""
        try:
            self.set_rate(name, bits_per_s)
            yield
        finally:
            self.set_rate(name, None)

    # ---- inside ----------------------------------------------------------------------------------
    def _namespace(self, name: str) -> Namespace:
        namespace = Namespace(name)
        self._undo.callback(namespace.close)
        return namespace

    def _add(self, name: str, number: int) -> Host:
        host = Host(name, self._network[number], self._namespace(name), f"port-{number}")
        self._plug_in(host.port, "eth0", host.path)
        host.namespace.run("ip", "address", "add", f"{host.address}/{self._network.prefixlen}", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.namespace.run("ip", "link", "set", device, "up")
        self._hub.run("tc", "qdisc", "add", "dev", host.port, "clsact")
        return host

    def _plug_in(self, port: str, device: str, path: str) -> None:
        """A cable from the bridge to `device`, an interface of the namespace at `path`."""
        cable = ("type", "veth", "peer", "name", device, "netns", path)
        self._hub.run("ip", "link", "add", port, *cable)
        self._hub.run("ip", "link", "set", port, "master", "bridge")
        self._hub.run("ip", "link", "set", port, "up")

    def _add_own_interface(self) -> None:
        device = f"tt{os.getpid()}-{next(_numbers)}"
        self._plug_in("own", device, f"/proc/{os.getpid()}/ns/net")
        self._undo.callback(run_here, "ip", "link", "del", device)
        own = self._network[OWN_NUMBER]
        run_here("ip", "address", "add", f"{own}/{self._network.prefixlen}", "dev", device)
        run_here("ip", "link", "set", device, "up")

    def _filter(self, host: Host, losses: Mapping[IPv4Address, float]) -> None:
        # A packet that is divided later would be lost as a whole, 64 KiB at once.
        is_lossy = any(0 < each < 1 for each in losses.values())
        segments = "1" if is_lossy else str(MOST_SEGMENTS)
        host.namespace.run("ip", "link", "set", "eth0", "gso_max_segs", segments)
        filter_words = ("dev", host.port, "ingress", "protocol", "all", "prio", "1", "handle", "1", "bpf")
        program = ("direct-action", "bytecode", loss_program(losses))
        self._hub.run("tc", "filter", "replace", *filter_words, *program)


@contextmanager
def _own_network() -> Iterator[IPv4Network]:
    """Addresses that no other test of this machine has meanwhile.

    Raises:
        RuntimeError: all are taken.
    """
    for network in random.sample(NETWORKS, len(NETWORKS)):
        with socket.socket(socket.AF_UNIX) as lock, contextlib.suppress(OSError):
            lock.bind(f"\0triptych-test-{network.network_address}")  # gone with this process
            if not run_here("ip", "route", "show", str(network)):
                yield network
                return
    raise RuntimeError("every network of 10.213.0.0/16 is taken")
