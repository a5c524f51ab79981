"""Soak of the cache_store: producers and consumers under random kill -9, of themselves and of the store.

    python benchmarks/soak_store.py [--minutes N] [--seed N] [--producers N] [--consumers N]

Every tensor that a consumer gets must hold the bytes that its mm_hash stands for, at the first look and
again a moment later, just before it lets go. At the end, with everybody gone: no reservation, no pin,
no watch, and every block is free or of an entry that can be evicted. Exit status 1 if not.
"""

import argparse
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import cast

from triptych_cache_store.testing import StoreProcess
from triptych_common.domain.errors import StoreError, TriptychError
from triptych_common.protocol.store import (
    AlreadySealed,
    Cancel,
    Descriptor,
    EntrySealed,
    Evict,
    Pinned,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    StoreStats,
    TensorSpec,
    Unpin,
    Unwatch,
)
from triptych_common.region import Push, RegionMapping, StoreSession
from triptych_common.region.fence import check_descriptor

REGION_BYTES = 24 << 20
NUM_HASHES = 60
UNIT = 64  # bytes of the pattern of an mm_hash
WRONG_BYTES_STATUS = 3
TALLY_STEP = 5
pause = threading.Event().wait


def spec_of(number: int) -> TensorSpec:
    """16 KiB to 4 MiB, always the same for a number."""
    rows = int(4 * 256 ** (number / (NUM_HASHES - 1)))
    return TensorSpec(shape=(rows, 2048), dtype="bfloat16", num_bytes=rows * 4096)


def bytes_of(mm_hash: str, num_bytes: int) -> bytes:
    return mm_hash.encode() * (num_bytes // UNIT)


class Worker:
    """One process of the soak: a session, a mapping, and steps without end."""

    def __init__(self, socket: str, name: str, seed: int, tally: Path) -> None:
        self._socket, self._name, self._tally = socket, name, tally
        self._random = random.Random(seed)
        self._pushes: queue.SimpleQueue[Push] = queue.SimpleQueue()
        self._count = 0

    def run(self) -> None:
        while True:
            try:
                self._session = StoreSession.connect(
                    self._socket, self._name, on_push=self._pushes.put, reconnect_timeout_s=30
                )
            except StoreError:
                pause(0.05)
                continue
            welcome = self._session.welcome
            self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
            try:
                while True:
                    self.step(self._random.randrange(NUM_HASHES))
            except StoreError as error:
                with self._tally.open("a") as tally:
                    tally.write(f"session {self._name} {error.code}\n")
            finally:
                self._session.close()

    def step(self, number: int) -> None:
        raise NotImplementedError

    def count(self) -> None:
        self._count += 1
        if self._count % TALLY_STEP == 0:
            with self._tally.open("a") as tally:
                tally.write(f"done {self._name} {TALLY_STEP}\n")


class ProducerWorker(Worker):
    def step(self, number: int) -> None:
        mm_hash, spec = f"{number:064x}", spec_of(number)
        try:
            reserved = self._session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec), 30)
        except StoreError as error:
            if error.code != "full":
                raise
            pause(0.005)
            return
        if isinstance(reserved, AlreadySealed):
            pause(0.001)
            return
        reserved = cast(Reserved, reserved)
        if self._random.random() < 0.1:
            self._session.request(Cancel(seq=0, reservation_id=reserved.reservation_id), 30)
            return
        data = bytes_of(mm_hash, spec.num_bytes)
        for start in range(0, len(data), 1 << 18):  # in pieces, so that a kill hits the middle
            piece = data[start : start + (1 << 18)]
            self._mapping.view(reserved.offset + start, len(piece))[:] = piece
        self._session.request(Seal(seq=0, reservation_id=reserved.reservation_id), 30)
        self.count()


class ConsumerWorker(Worker):
    def step(self, number: int) -> None:
        mm_hash = f"{number:064x}"
        reply = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash), 30)
        if isinstance(reply, Pinned):
            self._use(reply.pin_id, reply.descriptor)
            return
        self._take_pushes(time.monotonic() + 0.1)
        self._session.request(Unwatch(seq=0, mm_hash=mm_hash), 30)
        self._take_pushes(0.0)

    def _take_pushes(self, deadline: float) -> None:
        while True:
            try:
                push = self._pushes.get(timeout=max(0.0001, deadline - time.monotonic()))
            except queue.Empty:
                return
            if isinstance(push, EntrySealed):
                self._use(push.pin_id, push.descriptor)
                deadline = 0.0

    def _use(self, pin_id: int, descriptor: Descriptor) -> None:
        check_descriptor(self._mapping, descriptor)
        expected = bytes_of(descriptor.mm_hash, descriptor.spec.num_bytes)
        for _ in range(2):
            if self._mapping.view(descriptor.offset, len(expected)) != expected:
                with self._tally.open("a") as tally:
                    tally.write(f"wrong {self._name} {descriptor.mm_hash}\n")
                sys.exit(WRONG_BYTES_STATUS)
            pause(self._random.random() * 0.02)
        self._session.request(Unpin(seq=0, pin_id=pin_id), 30)
        self.count()


ROLES: dict[str, type[Worker]] = {"producer": ProducerWorker, "consumer": ConsumerWorker}


class Soak:
    """Starts everybody, kills at random, starts again, and looks at what is left."""

    def __init__(self, run_dir: Path, seed: int, num_producers: int, num_consumers: int) -> None:
        self._random = random.Random(seed)
        self._store = StoreProcess(run_dir, region_bytes=REGION_BYTES)
        self._tally = run_dir / "tally"
        self._tally.touch()
        names = [f"producer-{n}/w" for n in range(num_producers)]
        names += [f"consumer-{n}/w" for n in range(num_consumers)]
        self._workers: dict[str, subprocess.Popen[bytes] | None] = dict.fromkeys(names)
        self._num_kills = self._num_store_kills = 0

    def run(self, seconds: float) -> list[str]:
        """What was wrong; empty: nothing."""
        self._store.start()
        try:
            self._start_workers()
            deadline = time.monotonic() + seconds
            next_store_kill = time.monotonic() + 2
            while time.monotonic() < deadline:
                pause(self._random.uniform(0.05, 0.4))
                name = self._random.choice(list(self._workers))
                self._kill(name)
                if time.monotonic() > next_store_kill:
                    self._store.stop(signal.SIGKILL)
                    self._num_store_kills += 1
                    self._store.start()
                    next_store_kill = time.monotonic() + self._random.uniform(1, 4)
                self._start_workers()
            for name in self._workers:
                self._kill(name)
            return self._faults()
        finally:
            for worker in self._workers.values():
                if worker is not None:
                    worker.kill()
                    worker.wait(10)
            self._store.close()

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
            self._num_kills += 1

    def _faults(self) -> list[str]:
        stats = self._wait_until_quiet()
        lines = self._tally.read_text().splitlines()
        done = [line.split() for line in lines if line.startswith("done")]
        counts = {
            role: sum(int(number) for _, name, number in done if name.startswith(role)) for role in ROLES
        }
        print(
            f"{counts['producer']} tensors written, {counts['consumer']} read; "
            f"{self._num_kills} workers and {self._num_store_kills} stores killed"
        )
        faults = [line for line in lines if not line.startswith("done")]
        held = (stats.num_reservations, stats.num_pins, stats.num_watches, stats.abandoned_num_bytes)
        if held != (0, 0, 0, 0):
            faults.append(f"left behind: reservations, pins, watches, abandoned bytes {held}")
        if stats.free_num_bytes + stats.ready_num_bytes != stats.region_num_bytes:
            faults.append("blocks leaked")
        self._store.connect("operator").request(Evict(seq=0))
        if self._store.stats().free_num_bytes != stats.region_num_bytes:
            faults.append("blocks leaked in entries")
        if not counts["producer"] or not counts["consumer"]:
            faults.append(f"nothing was handed over: {counts}")
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
