"""Soak of the cache_store: producers and consumers under random kill -9, of themselves and of the store.

    python benchmarks/soak_store.py [--minutes N] [--seed N] [--producers N] [--consumers N]

Every tensor that a consumer gets must hold the bytes that its mm_hash stands for, at first and
again a moment later, just before it lets go; now and then one of them has the store verify all of them.
At the end, with everybody gone: no reservation, no pin, no watch, and every block is free or of an entry
that can be evicted. Meanwhile the store's own memory (the region apart) and its open files stay below a
limit, however often clients come and go. Exit status 1 if not.
"""

import argparse
import math
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from store_soak.workers import ROLES

from tests.support.stores import StoreProcess
from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.store import Evict, StoreStats

REGION_BYTES = 24 << 20
MAX_STORE_BYTES = 256 << 20  # memory of its own: Python, its tables; the region is not in it
MAX_STORE_FILES = 64
LONG_LIFE_SHARE = 0.2  # of the stores: these may live long enough to show a leak
pause = threading.Event().wait


class StoreUse:
    """The most that any of the stores took: memory of its own, in bytes, and open files."""

    def __init__(self) -> None:
        self.most_bytes = self.most_files = 0

    def measure(self, pid: int) -> None:
        status = (Path("/proc") / str(pid) / "status").read_text()
        own = sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        self.most_bytes = max(self.most_bytes, own << 10)
        self.most_files = max(self.most_files, len(list((Path("/proc") / str(pid) / "fd").iterdir())))

    def faults(self) -> list[str]:
        lines = []
        if self.most_bytes > MAX_STORE_BYTES:
            lines.append(f"the store took {self.most_bytes} bytes")
        if self.most_files > MAX_STORE_FILES:
            lines.append(f"the store had {self.most_files} open files")
        return lines


class Soak:
    """Starts the processes, kills at random, starts again, and checks what is left."""

    def __init__(self, run_dir: Path, seed: int, num_producers: int, num_consumers: int) -> None:
        self._random = random.Random(seed)
        self._store = StoreProcess(run_dir, region_bytes=REGION_BYTES)
        self._tally = run_dir / "tally"
        self._tally.touch()
        self._lines = self._tally.open()
        names = [f"producer-{n}/w" for n in range(num_producers)]
        names += [f"consumer-{n}/w" for n in range(num_consumers)]
        self._workers: dict[str, subprocess.Popen[bytes] | None] = dict.fromkeys(names)
        self._kills: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()  # from the tally: what was done, by role
        self._tally_faults: list[str] = []
        self._use = StoreUse()

    def run(self, seconds: float) -> list[str]:
        """Run the soak; returns its faults."""
        self._store.start()
        try:
            self._start_workers()
            deadline = time.monotonic() + seconds
            next_store_kill = time.monotonic() + 2
            while time.monotonic() < deadline:
                pause(self._random.uniform(0.1, 0.8))
                self._kill(self._random.choice(list(self._workers)))
                self._use.measure(self._store.pid)
                if time.monotonic() > next_store_kill:
                    self._store.stop(signal.SIGKILL)
                    self._kills["store"] += 1
                    self._store.start()
                    next_store_kill = time.monotonic() + self._store_life_s()
                self._start_workers()
                self._read_tally()
            for name in self._workers:
                self._kill(name)
            return self._faults()
        finally:
            for worker in self._workers.values():
                if worker is not None:
                    worker.kill()
                    worker.wait(10)
            self._lines.close()
            self._store.close()

    def _store_life_s(self) -> float:
        lives_long = self._random.random() < LONG_LIFE_SHARE
        return self._random.uniform(10, 40) if lives_long else self._random.uniform(1, 4)

    def _start_workers(self) -> None:
        for name, worker in self._workers.items():
            if worker is None or worker.poll() is not None:
                command = [sys.executable, __file__, "--worker", name, "--socket", str(self._store.socket)]
                command += ["--tally", str(self._tally), "--seed", str(self._random.randrange(1 << 30))]
                self._workers[name] = subprocess.Popen(command)

    def _kill(self, name: str) -> None:
        worker = self._workers[name]
        if worker is not None:
            worker.kill()
            worker.wait(10)
            self._workers[name] = None
            self._kills[name.split("-")[0]] += 1

    def _read_tally(self) -> None:
        """Take what the workers wrote since the last call."""
        for line in self._lines.read().splitlines():
            kind, name, rest = line.split(maxsplit=2)
            if kind in ("done", "verified"):
                self._counts[name.split("-")[0] if kind == "done" else kind] += int(rest)
            else:
                self._tally_faults.append(line)

    def _faults(self) -> list[str]:
        """Print the report; returns the faults."""
        stats = self._wait_until_quiet()
        self._use.measure(self._store.pid)
        self._read_tally()
        self._store.connect("operator").request(Evict(seq=0))
        after = self._store.stats()
        num_leaked = math.ceil((after.region_num_bytes - after.free_num_bytes) / self._store.block_bytes)
        print(f"tensors written: {self._counts['producer']}")
        print(f"tensors checked: {self._counts['consumer']}, each twice")
        print(f"whole stores verified: {self._counts['verified']}")
        print("kills: " + ", ".join(f"{self._kills[role]} {role}s" for role in (*ROLES, "store")))
        print(f"leaked blocks: {num_leaked}")
        print(f"orphaned pins: {stats.num_pins}")
        print(f"reservations and watches left: {stats.num_reservations + stats.num_watches}")
        print(
            f"the store took at most {self._use.most_bytes / (1 << 20):.0f} MiB of its own "
            f"and {self._use.most_files} open files"
        )
        faults = [*self._tally_faults, *self._use.faults()]
        held = (stats.num_reservations, stats.num_pins, stats.num_watches, stats.abandoned_num_bytes)
        if held != (0, 0, 0, 0):
            faults.append(f"left behind: reservations, pins, watches, abandoned bytes {held}")
        if stats.free_num_bytes + stats.ready_num_bytes != stats.region_num_bytes or num_leaked:
            faults.append(f"{num_leaked} blocks leaked")
        if not self._counts["producer"] or not self._counts["consumer"]:
            faults.append(f"nothing was handed over: {dict(self._counts)}")
        return faults

    def _wait_until_quiet(self) -> StoreStats:
        """The store may need a moment to see that the last ones are gone."""
        for _ in range(100):
            stats = self._store.stats()
            if stats.num_sessions == 1 and stats.num_pins == stats.num_reservations == 0:
                break
            pause(0.05)
        return stats


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--producers", type=int, default=4)
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--tally", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        role = ROLES[options.worker.split("-")[0]]
        role(options.socket, options.worker, options.seed, options.tally).run()
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-soak-", dir="/dev/shm"))
    try:
        faults = Soak(run_dir, options.seed, options.producers, options.consumers).run(options.minutes * 60)
    except TriptychError as error:
        faults = [f"the soak could not go on: {error}"]
    finally:
        shutil.rmtree(run_dir)
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
