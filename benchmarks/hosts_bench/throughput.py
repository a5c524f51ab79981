"""Bytes per second between two hosts: the agents, a bare socket, NIXL and iperf3 if installed."""

import asyncio
import json
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from blake3 import blake3

from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.fabric_host import HAS_NIXL, UCX_BETWEEN_HOSTS, FabricHost, transports_option
from tests.support.fabric.orders import OrderingGateway, completed, ordering_gateway
from tests.support.hosts.control_redis import control_redis
from tests.support.hosts.network import Host, Network
from triptych_common.protocol.store import Evict

MIB = 1 << 20
ENTRY_BYTES = 16 * MIB
FABRIC_PORT, BARE_PORT = 7420, 7430
CHUNK_BYTES = MIB
LIMIT_S = 60.0
CONTROL = "control"


async def measure(num_entries: int, repeats: int, rate_bits: int | None) -> dict[str, list[float]]:
    """Bytes per second of each way by repeat; the first of each is a warm-up."""
    found: dict[str, list[float]] = {}
    with _opened(num_entries, rate_bits) as (network, ends, redis_url):
        async with ordering_gateway(redis_url) as gateway:
            for number in range(repeats + 1):
                rates = {
                    way: await _agents(gateway, near, far, num_entries, number)
                    for way, (near, far) in ends.items()
                }
                rates["socket"] = await asyncio.to_thread(_bare, network, num_entries * ENTRY_BYTES)
                if shutil.which("iperf3"):
                    rates["iperf3"] = await asyncio.to_thread(_iperf3, network, num_entries * ENTRY_BYTES)
                if number:
                    for way, rate in rates.items():
                        found.setdefault(way, []).append(rate)
    return found


@contextmanager
def _opened(
    num_entries: int, rate_bits: int | None
) -> Iterator[tuple[Network, dict[str, tuple[FabricHost, FabricHost]], str]]:
    """The two hosts, their agents by way, and the URL of Redis."""
    region_bytes = (num_entries + 2) * ENTRY_BYTES
    ways = {"agent": "tcp"}
    if HAS_NIXL:
        ways["nixl"] = "nixl"
        os.environ |= UCX_BETWEEN_HOSTS
    with ExitStack() as stack:
        network = stack.enter_context(Network(["a", "b", CONTROL]))
        server = stack.enter_context(control_redis(network[CONTROL]))
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="triptych-bench-"))
        )
        key_file = write_fabric_key(folder / "key")

        def started(host: str, way: str) -> FabricHost:
            end = FabricHost(
                folder / f"{host}-{way}",
                server.service_url,
                f"{host}-{way}",
                FABRIC_PORT + list(ways).index(way),
                f"--fabric-key-file={key_file}",
                f"--fabric-listen-host={network[host].address}",
                transports_option(ways[way]),
                region_bytes=region_bytes,
            )
            stack.callback(end.close)
            network[host].call(end.start)
            return end

        ends = {way: (started("a", way), started("b", way)) for way in ways}
        for host in ("a", "b"):
            network.set_rate(host, rate_bits)
        yield network, ends, server.url


async def _agents(
    gateway: OrderingGateway, near: FabricHost, far: FabricHost, num_entries: int, number: int
) -> float:
    """Bytes per second from the orders to the last result."""
    names = [blake3(f"{number} {entry}".encode()).hexdigest() for entry in range(num_entries)]
    for end in (near, far):
        await asyncio.to_thread(end.session.request, Evict(seq=0))
    for name in names:
        await asyncio.to_thread(near.encode, name, bytes(ENTRY_BYTES))
    began = time.monotonic()
    orders = [await gateway.order(near, far, name, ttl_ms=int(LIMIT_S * 1000)) for name in names]
    results = [completed(await asyncio.wait_for(order, LIMIT_S)) for order in orders]
    elapsed_s = time.monotonic() - began
    num_bytes = sum(result.num_bytes for result in results)
    if num_bytes != num_entries * ENTRY_BYTES:
        raise RuntimeError(f"{num_bytes} bytes crossed the network, not {num_entries * ENTRY_BYTES}")
    return num_bytes / elapsed_s


def _bare(network: Network, num_bytes: int) -> float:
    """Bytes per second from memory to memory over one connection: the least that a copy can cost.

    Both sides use as much memory as the agents' entries, since reused memory would stay in a cache.
    """
    address = (str(network["b"].address), BARE_PORT)
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    source, target = (mmap.mmap(-1, num_bytes, flags) for _ in range(2))
    ended: list[float] = []

    def receive(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, memoryview(target) as view:
            num_read = 0
            while num_read < num_bytes:
                num_read += connection.recv_into(view[num_read : num_read + CHUNK_BYTES])
        ended.append(time.monotonic())

    with network["b"].call(lambda: socket.create_server(address)) as listener:
        thread = threading.Thread(target=receive, args=(listener,), daemon=True)
        thread.start()
        with (
            network["a"].call(lambda: socket.create_connection(address, LIMIT_S)) as connection,
            memoryview(source) as view,
        ):
            connection.settimeout(LIMIT_S)
            began = time.monotonic()
            for at in range(0, num_bytes, CHUNK_BYTES):
                connection.sendall(view[at : at + CHUNK_BYTES])
            thread.join(LIMIT_S)
    return num_bytes / (ended[0] - began)


def _iperf3(network: Network, num_bytes: int) -> float:
    server = _started(network["b"], "iperf3", "-s", "-1", "-p", str(BARE_PORT))
    try:
        address = str(network["b"].address)
        reply = network["a"].namespace.run(
            "iperf3", "-c", address, "-p", str(BARE_PORT), "-n", str(num_bytes), "-J",
            "--connect-timeout", "5000",
        )  # fmt: skip
    finally:
        server.terminate()
        server.wait(LIMIT_S)
    return float(json.loads(reply)["end"]["sum_received"]["bits_per_second"]) / 8


def _started(host: Host, *command: str) -> "subprocess.Popen[bytes]":
    process = host.start(command, Path("/dev/null"))
    deadline = time.monotonic() + LIMIT_S
    pause = threading.Event()
    while f":{BARE_PORT}" not in host.namespace.run("ss", "-ltn"):
        if time.monotonic() > deadline:
            raise RuntimeError("iperf3 does not listen")
        pause.wait(0.02)
    return process
