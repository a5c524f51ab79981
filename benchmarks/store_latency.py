"""Cost of the store's commands: ping, and reserve + seal + pin, in an empty store and in a full one.

    python benchmarks/store_latency.py [--entries N] [--clients N] [--cycles N] [--json FILE]

The store is filled with `--entries` sealed entries. Then `--clients` sessions exist, and every client in
turn measures one ping and one cycle on a small tensor (each command waits for its answer), so that both
see the same machine at the same moment. A second measurement has all clients at work at once: their threads
are in one process, so it shows how the store copes, not how fast it is. Medians, of all clients together.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.stores import StoreProcess
from triptych_common.protocol.store import (
    Evict,
    Ping,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    TensorSpec,
    Unpin,
)
from triptych_common.store_session import StoreSession

SPEC = TensorSpec(shape=(4, 4), dtype="float32", num_bytes=64)
BLOCK_BYTES = 4096
HEADER_BYTES_PER_BLOCK = 512
IN_FLIGHT = 256


@dataclass(frozen=True)
class Cost:
    """Microseconds; medians and the 99th percentiles."""

    num_entries: int
    num_clients: int
    at_once: bool
    ping_us: float
    cycle_us: float
    ping_p99_us: float
    cycle_p99_us: float

    @property
    def ratio(self) -> float:
        """Pings that reserve + seal + pin cost."""
        return self.cycle_us / self.ping_us


class Client:
    """One session and what it measured, in seconds."""

    def __init__(self, session: StoreSession, number: int) -> None:
        self._session = session
        self._next = (number + 1) << 128
        self.pings: list[float] = []
        self.cycles: list[float] = []

    def measure(self) -> None:
        """One ping, one cycle, and let go of the entry."""
        self._next += 1
        mm_hash = f"{self._next:064x}"
        started_at = time.perf_counter()
        self._session.request(Ping(seq=0))
        pinged_at = time.perf_counter()
        reserved = self._session.request(Reserve(seq=0, mm_hash=mm_hash, spec=SPEC))
        if not isinstance(reserved, Reserved):
            raise TypeError(f"{reserved.kind} is no reservation")
        self._session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
        pinned = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash))
        self.cycles.append(time.perf_counter() - pinged_at)
        self.pings.append(pinged_at - started_at)
        if not isinstance(pinned, Pinned):
            raise TypeError(f"{pinned.kind} is no pin")
        self._session.request(Unpin(seq=0, pin_id=pinned.pin_id))
        self._session.request(Evict(seq=0, mm_hash=mm_hash))


def fill(session: StoreSession, num_entries: int) -> None:
    """Seal `num_entries` entries, many commands in flight."""
    for start in range(0, num_entries, IN_FLIGHT):
        numbers = range(start, min(start + IN_FLIGHT, num_entries))
        reserves = [session.submit(Reserve(seq=0, mm_hash=f"{n:064x}", spec=SPEC)) for n in numbers]
        ids = [reply.reservation_id for each in reserves if isinstance(reply := each.result(30), Reserved)]
        if len(ids) != len(numbers):
            raise RuntimeError("the store has no room for so many entries")
        for seal in [session.submit(Seal(seq=0, reservation_id=each)) for each in ids]:
            seal.result(30)


def in_turn(clients: list[Client], num_cycles: int) -> None:
    for number in range(num_cycles):
        clients[number % len(clients)].measure()


def at_once(clients: list[Client], num_cycles: int) -> None:
    def work(client: Client) -> None:
        for _ in range(max(1, num_cycles // len(clients))):
            client.measure()

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cost(
    store: StoreProcess, num_clients: int, num_cycles: int, work: Callable[[list[Client], int], None]
) -> Cost:
    """Cost of the commands with the store's present contents."""
    sessions = [store.connect(f"client-{n}/latency") for n in range(num_clients)]
    clients = [Client(session, number) for number, session in enumerate(sessions)]
    try:
        in_turn(clients, num_clients)  # warms up
        for client in clients:
            client.pings.clear()
            client.cycles.clear()
        work(clients, num_cycles)
    finally:
        for session in sessions:
            session.close()
    pings = sorted(each * 1e6 for client in clients for each in client.pings)
    cycles = sorted(each * 1e6 for client in clients for each in client.cycles)
    return Cost(
        store.stats().num_entries,
        num_clients,
        work is at_once,
        statistics.median(pings),
        statistics.median(cycles),
        pings[int(0.99 * (len(pings) - 1))],
        cycles[int(0.99 * (len(cycles) - 1))],
    )


def run(num_entries: int, num_clients: int, num_cycles: int) -> list[Cost]:
    """An empty store with one client, a full one with one, with all in turn, and with all at once."""
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="/dev/shm"))
    num_bytes = (num_entries + num_entries // 8 + 1000) * (BLOCK_BYTES + HEADER_BYTES_PER_BLOCK)
    store = StoreProcess(
        run_dir, "--log-level=WARNING", region_bytes=num_bytes + (1 << 20), block_bytes=BLOCK_BYTES
    )
    try:
        store.start()
        costs = [cost(store, 1, num_cycles, in_turn)]
        filler = store.connect("filler")
        fill(filler, num_entries)
        filler.close()
        costs.append(cost(store, 1, num_cycles, in_turn))
        costs.append(cost(store, num_clients, num_cycles, in_turn))
        costs.append(cost(store, num_clients, num_cycles, at_once))
        return costs
    finally:
        store.close()
        shutil.rmtree(run_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--cycles", type=int, default=3000)
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    costs = run(options.entries, options.clients, options.cycles)
    print(f"microseconds; load average at the start {load}")
    titles = ("entries", "clients", "at once", "ping", "p99", "r+s+p", "p99", "pings")
    print(" ".join(f"{title:>8}" for title in titles))
    for each in costs:
        print(
            f"{each.num_entries:>8} {each.num_clients:>8} {'yes' if each.at_once else 'no':>8} "
            f"{each.ping_us:>8.0f} {each.ping_p99_us:>8.0f} {each.cycle_us:>8.0f} {each.cycle_p99_us:>8.0f} "
            f"{each.ratio:>8.2f}"
        )
    if options.json is not None:
        report = {
            "load_average": float(load),
            "costs": [asdict(each) | {"ratio": each.ratio} for each in costs],
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
