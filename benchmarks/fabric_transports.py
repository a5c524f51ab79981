"""Speed of entries from one store to another by each transport, beside a bare copy by a socket.

    python benchmarks/fabric_transports.py [--rounds N] [--entries N] [--mib N] [--transport NAME ...]
        [--json FILE]

Two stores with a fabric agent each for every transport, on one machine over loopback, and a pair of processes
that do nothing but `sendall` and `recv_into` between two mappings of tmpfs files. They take turns; a ratio is
taken within a round, and shown with its 95 % bootstrap interval. A transport counts from an entry's first
byte to the target's last seal, checksums on both sides included; `bare` from the first byte to the receiver's
word that all came. `nixl` is left out where it is not installed; `UCX_TLS=tcp,self` keeps it off shared
memory.
"""

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

from load.intervals import ratio_interval

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.conftest import embedded_redis  # noqa: E402
from tests.support.fabric.agent_process import write_fabric_key  # noqa: E402
from tests.support.fabric.fabric_host import HAS_NIXL, FabricHost, spec_of, transports_option  # noqa: E402  # noqa: E402
from tests.support.fabric.orders import OrderingGateway, completed, ordering_gateway  # noqa: E402
from tests.support.waiting import free_port  # noqa: E402
from triptych_common.protocol.store import Evict  # noqa: E402

MIB = 1 << 20
CHUNK_BYTES = MIB
GIB = 1 << 30
TRANSPORTS = ("tcp", "nixl")


def tmpfs(path: Path, num_bytes: int) -> mmap.mmap:
    """New mapped file on the tmpfs, with all its pages."""
    with path.open("wb+") as file:
        file.truncate(num_bytes)
        memory = mmap.mmap(file.fileno(), num_bytes)
    memory.write(os.urandom(MIB) * (num_bytes // MIB))
    return memory


def receive(listener: socket.socket, path: Path, num_bytes: int) -> None:
    """Receiver process: receives round after round, until the sender closes."""
    memory = memoryview(tmpfs(path, num_bytes))
    connection, _ = listener.accept()
    while True:
        position = 0
        while position < num_bytes:
            num_read = connection.recv_into(memory[position : position + CHUNK_BYTES])
            if not num_read:
                return
            position += num_read
        connection.sendall(b"+")


class BareCopy:
    """Two processes that copy over one connection."""

    def __init__(self, run_dir: Path, num_bytes: int) -> None:
        self._memory = memoryview(tmpfs(run_dir / "bare-source", num_bytes))
        listener = socket.create_server(("127.0.0.1", 0))
        process = get_context("fork").Process(
            target=receive, args=(listener, run_dir / "bare-target", num_bytes), daemon=True
        )
        process.start()
        self._process = process
        self._connection = socket.create_connection(listener.getsockname())
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def bytes_per_s(self) -> float:
        started_at = time.perf_counter()
        for position in range(0, len(self._memory), CHUNK_BYTES):
            self._connection.sendall(self._memory[position : position + CHUNK_BYTES])
        self._connection.recv(1)
        return len(self._memory) / (time.perf_counter() - started_at)

    def close(self) -> None:
        self._connection.close()
        self._process.join(5)


class FabricCopy:
    """Orders for sealed entries, one per round."""

    def __init__(
        self, source: FabricHost, target: FabricHost, gateway: OrderingGateway, entries: int
    ) -> None:
        self._source = source
        self._target = target
        self._gateway = gateway
        self._entries = [f"{number:064x}" for number in range(entries)]

    def fill(self, num_bytes: int) -> None:
        for mm_hash in self._entries:
            self._source.encode(mm_hash, os.urandom(num_bytes))

    async def bytes_per_s(self) -> float:
        self._target.session.request(Evict(seq=0))
        result = completed(await self._gateway.transfer(self._source, self._target, *self._entries))
        return result.num_bytes / result.transfer_s


async def measure(options: argparse.Namespace, run_dir: Path, redis_url: str) -> dict[str, list[float]]:
    num_bytes = options.mib * MIB
    total = options.entries * spec_of(num_bytes).num_bytes
    rates: dict[str, list[float]] = {"bare": [], **{each: [] for each in options.transport}}
    async with contextlib.AsyncExitStack() as stack:
        bare = BareCopy(run_dir, total)
        stack.callback(bare.close)
        gateway = await stack.enter_async_context(ordering_gateway(redis_url))
        arms: dict[str, FabricCopy] = {}
        for transport in options.transport:
            hosts = start_hosts(stack, run_dir, redis_url, transport, total)
            arms[transport] = FabricCopy(hosts[0], hosts[1], gateway, options.entries)
            await asyncio.to_thread(arms[transport].fill, num_bytes)
        for number in range(options.rounds + 1):
            taken = {"bare": await asyncio.to_thread(bare.bytes_per_s)}
            for transport, arm in arms.items():
                taken[transport] = await arm.bytes_per_s()
            if number:  # the first one warms up
                for name, rate in taken.items():
                    rates[name].append(rate)
    return rates


def start_hosts(
    stack: contextlib.AsyncExitStack, run_dir: Path, redis_url: str, transport: str, total: int
) -> list[FabricHost]:
    """Start a source and a target that have only this transport."""
    key = run_dir / "key"
    if not key.exists():
        write_fabric_key(key)
    hosts = [
        FabricHost(
            run_dir / name, redis_url, name, free_port(), f"--fabric-key-file={key}", "--log-level=WARNING",
            transports_option(transport), f"--fabric-max-bytes-in-flight={2 * total}",
            region_bytes=total + 64 * MIB,
        )
        for name in (f"{transport}-a", f"{transport}-b")
    ]  # fmt: skip
    for host in hosts:
        stack.callback(host.close)
        host.start()
    return hosts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--entries", type=int, default=32, help="in one order")
    parser.add_argument("--mib", type=int, default=16, help="of an entry")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--transport", nargs="*", choices=TRANSPORTS, default=None, help="of these alone")
    options = parser.parse_args()
    options.transport = options.transport or [each for each in TRANSPORTS if each != "nixl" or HAS_NIXL]
    directory = tempfile.TemporaryDirectory(prefix="triptych-bench-", dir="/dev/shm")
    with directory as run_dir, embedded_redis() as redis:
        rates = asyncio.run(measure(options, Path(run_dir), redis.url))
    ratios = {each: ratio_interval(rates[each], rates["bare"]) for each in options.transport}
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{options.entries} entries of {options.mib} MiB, {options.rounds} rounds, load average {load}")
    for name, values in rates.items():
        ratio = f"   {ratios[name]} of bare" if name in ratios else ""
        print(f"{name:>8} {statistics.median(values) / GIB:>6.2f} GiB/s{ratio}")
    if options.json is not None:
        shown = {name: [each.low, each.middle, each.high] for name, each in ratios.items()}
        report = {"rates": rates, "ratios": shown, "load_average": float(load)}
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
