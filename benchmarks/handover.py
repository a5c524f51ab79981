"""From one process's tensor to another's: the store beside the usual ways, in one run.

    python benchmarks/handover.py [--json FILE] [--sizes MIB ...] [--repeats N]

For each size, a producer (this process) hands a bfloat16 tensor `[rows, 4096]` to a consumer process,
which checks its first and last row and answers. Measured by the producer from the start of its write to
the consumer's answer that the tensor is usable; the empty round trip between the two is shown apart.
The runs of all ways alternate, so that a busy machine disturbs them alike; medians are reported.

    memcpy         one copy of the same bytes to private memory as cold as the region: the floor
    store          reserve, copy into the region, seal; the consumer gets a view (no copy)
    shm copy       multiprocessing.shared_memory: copy in, copy out
    st tmpfs       safetensors file on the tmpfs, loaded by the consumer
    st disk        safetensors file in the working directory, loaded by the consumer
    redis          SET by the producer, GET by the consumer, through a Unix socket (--redis-url)
"""

import argparse
import json
import math
import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from triptych_cache_store.testing import PushLog, StoreProcess
from triptych_common.protocol.store import EntrySealed, Ping, PinOrWatch, Reserve, Reserved, Seal, Unpin
from triptych_common.region import RegionMapping, StoreSession
from triptych_common.region.tensor_view import tensor_spec, tensor_view, write_tensor

MIB = 1 << 20
WIDTH = 4096
DEFAULT_SIZES_MIB = (0.0625, 1, 4, 16, 64)


def fingerprint(tensor: torch.Tensor) -> list[float]:
    """Touches both ends of the tensor, so that "usable" means readable."""
    return [float(tensor[0, 0]), float(tensor[-1, -1])]


# ---- the consumer process ------------------------------------------------------------------------
class Consumer:
    """Answers each order with the fingerprint of the tensor it got."""

    def __init__(self, pipe: Connection, socket: str, redis_url: str | None) -> None:
        self._pipe = pipe
        self._pushes = PushLog()
        self._session = StoreSession.connect(socket, "consumer", on_push=self._pushes)
        welcome = self._session.welcome
        self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
        self._mapping.wait_populated(30)
        self._redis = _redis(redis_url)

    def serve(self) -> None:
        while (order := self._pipe.recv()) is not None:
            self._pipe.send(getattr(self, order[0])(*order[1:]))
        self._session.close()

    def nothing(self) -> None:
        """The empty round trip."""

    def watch(self, mm_hash: str) -> None:
        self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash))

    def store(self) -> list[float]:
        push = cast(EntrySealed, self._pushes.wait_next(30))
        view = tensor_view(self._mapping, push.descriptor)
        result = fingerprint(view)
        del view
        self._session.submit(Unpin(seq=0, pin_id=push.pin_id))
        return result

    def shm(self, name: str, rows: int) -> list[float]:
        memory = SharedMemory(name)
        tensor = torch.frombuffer(memory.buf, dtype=torch.bfloat16, count=rows * WIDTH).clone()
        result = fingerprint(tensor.view(rows, WIDTH))
        memory.close()
        return result

    def file(self, path: str) -> list[float]:
        return fingerprint(load_file(path)["ec"])

    def redis(self, key: str, rows: int) -> list[float]:
        data = bytearray(self._redis.get(key))
        return fingerprint(torch.frombuffer(data, dtype=torch.bfloat16).view(rows, WIDTH))


def _redis(url: str | None) -> Any:
    if url is None:
        return None
    import redis

    return redis.Redis.from_url(url)


def consume(pipe: Connection, socket: str, redis_url: str | None) -> None:
    Consumer(pipe, socket, redis_url).serve()


# ---- the producer, i.e. this process -------------------------------------------------------------
class Producer:
    """One method per way; each returns when the consumer has the tensor."""

    def __init__(
        self, session: StoreSession, pipe: Connection, directories: dict[str, Path], redis: Any
    ) -> None:
        self._session = session
        self._mapping = RegionMapping.open(session.welcome.region_path, session.welcome.region_num_bytes)
        self._mapping.wait_populated(30)
        self._pipe = pipe
        self._directories = directories
        self._redis = redis
        self._arena = torch.zeros(self._mapping.num_bytes // 2, dtype=torch.bfloat16)
        self._count = 0

    def prepare(self, tensor: torch.Tensor) -> None:
        """Before the clock runs: the consumer waits for the tensor already."""
        self._count += 1
        self._ask("watch", self._mm_hash)

    @property
    def _mm_hash(self) -> str:
        return f"{self._count:064x}"

    def _ask(self, *order: object) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()

    def round_trip(self, tensor: torch.Tensor) -> Any:
        return self._ask("nothing")

    def memcpy(self, tensor: torch.Tensor) -> Any:
        start = self._count * tensor.numel() % (self._arena.numel() - tensor.numel())
        copy = self._arena[start : start + tensor.numel()].view(tensor.shape)
        copy.copy_(tensor)
        return fingerprint(copy)

    def store(self, tensor: torch.Tensor) -> Any:
        reserve = Reserve(seq=0, mm_hash=self._mm_hash, spec=tensor_spec(tensor))
        reserved = cast(Reserved, self._session.request(reserve))
        write_tensor(self._mapping, reserved.offset, tensor)
        self._session.submit(Seal(seq=0, reservation_id=reserved.reservation_id))
        return self._ask("store")

    def shm_copy(self, tensor: torch.Tensor) -> Any:
        memory = SharedMemory(create=True, size=tensor.nbytes)
        try:
            torch.frombuffer(memory.buf, dtype=torch.bfloat16, count=tensor.numel()).view(tensor.shape).copy_(
                tensor
            )
            return self._ask("shm", memory.name, tensor.shape[0])
        finally:
            memory.close()
            memory.unlink()

    def safetensors_tmpfs(self, tensor: torch.Tensor) -> Any:
        return self._file("tmpfs", tensor)

    def safetensors_disk(self, tensor: torch.Tensor) -> Any:
        return self._file("disk", tensor)

    def redis(self, tensor: torch.Tensor) -> Any:
        self._redis.set("ec", memoryview(tensor.view(torch.uint8).numpy()).cast("B"), ex=60)
        return self._ask("redis", "ec", tensor.shape[0])

    def _file(self, where: str, tensor: torch.Tensor) -> Any:
        path = self._directories[where] / f"{self._count}.safetensors"
        save_file({"ec": tensor}, path)
        try:
            return self._ask("file", str(path))
        finally:
            path.unlink()

    def command_times(self, num_times: int) -> tuple[float, float]:
        """Medians in seconds: one ping; reserve, seal and pin together (each waits for its answer)."""
        spec = tensor_spec(torch.empty(8, 16, dtype=torch.bfloat16))
        pings, cycles = [], []
        for number in range(num_times):
            mm_hash = f"{number + (1 << 200):064x}"
            started_at = time.perf_counter()
            self._session.request(Ping(seq=0))
            pinged_at = time.perf_counter()
            reserved = cast(Reserved, self._session.request(Reserve(seq=0, mm_hash=mm_hash, spec=spec)))
            self._session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
            pinned: Any = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash))
            cycles.append(time.perf_counter() - pinged_at)
            pings.append(pinged_at - started_at)
            self._session.request(Unpin(seq=0, pin_id=pinned.pin_id))
        return statistics.median(pings), statistics.median(cycles)


@dataclass(frozen=True)
class Result:
    way: str
    size_mib: float
    median_ms: float
    gib_per_s: float


Ways = dict[str, Callable[[torch.Tensor], Any]]


def measure(producer: Producer, ways: Ways, mib: float, repeats: int) -> list[Result]:
    rows = max(1, int(mib * MIB) // (2 * WIDTH))
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(repeats + 2):
        tensor = torch.randn(rows, WIDTH).bfloat16()
        producer.prepare(tensor)
        for way, run in ways.items():
            started_at = time.perf_counter()
            answer = run(tensor)
            elapsed = time.perf_counter() - started_at
            if way != "round trip" and answer != fingerprint(tensor):
                raise RuntimeError(f"{way}: the tensor that arrived is another")
            if number >= 2:  # the first ones warm up
                times[way].append(elapsed)
    medians = {way: statistics.median(values) for way, values in times.items()}
    return [Result(way, mib, value * 1e3, rows * WIDTH * 2 / value / 2**30) for way, value in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--sizes", type=float, nargs="+", default=DEFAULT_SIZES_MIB, metavar="MIB")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--redis-url", help="compare with the tensor through this Redis")
    options = parser.parse_args()
    torch.set_num_threads(1)
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="triptych-bench-", dir="."))
    region_bytes = 64 * MIB + 4 * math.ceil(max(options.sizes)) * MIB
    store = StoreProcess(run_dir, region_bytes=region_bytes)
    try:
        store.start()
        report = run(options, store, {"tmpfs": run_dir, "disk": disk})
    finally:
        store.close()
        shutil.rmtree(run_dir)
        shutil.rmtree(disk)
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1))


def run(options: argparse.Namespace, store: StoreProcess, directories: dict[str, Path]) -> dict[str, object]:
    """All sizes, all ways; prints the tables."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=consume, args=(other, str(store.socket), options.redis_url))
    child.start()
    producer = Producer(store.connect("producer"), pipe, directories, _redis(options.redis_url))
    ways: Ways = {
        "memcpy": producer.memcpy,
        "round trip": producer.round_trip,
        "store": producer.store,
        "shm copy": producer.shm_copy,
        "st tmpfs": producer.safetensors_tmpfs,
        "st disk": producer.safetensors_disk,
    }
    if options.redis_url is not None:
        ways["redis"] = producer.redis
    results: list[Result] = []
    print("milliseconds, median; in brackets: times slower than the store")
    print(f"{'MiB':>8} " + "".join(f"{way:>18}" for way in ways))
    for mib in options.sizes:
        measured = measure(producer, ways, mib, options.repeats)
        results += measured
        base = next(result.median_ms for result in measured if result.way == "store")
        cells = (f"{result.median_ms:.3f} ({result.median_ms / base:.1f})" for result in measured)
        print(f"{mib:>8g} " + "".join(f"{cell:>18}" for cell in cells), flush=True)
    ping_s, cycle_s = producer.command_times(500)
    ratio = cycle_s / ping_s
    print(f"ping {ping_s * 1e6:.0f} us; reserve + seal + pin {cycle_s * 1e6:.0f} us: {ratio:.1f} pings")
    pipe.send(None)
    child.join(30)
    return {
        "results": [asdict(result) for result in results],
        "ping_us": ping_s * 1e6,
        "reserve_seal_pin_us": cycle_s * 1e6,
    }


if __name__ == "__main__":
    main()
