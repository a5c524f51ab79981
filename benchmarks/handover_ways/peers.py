"""Producer and consumer processes, and the pipes that steer them. JSON on the pipes, nothing pickled.

Times are CLOCK_MONOTONIC, which all processes of a machine share: the producer notes when it begins, the
consumer when it has the tensor and when it has read every byte of it.
"""

import gc
import json
import multiprocessing
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from handover_ways.ways import (
    WIDTH,
    Memcpy,
    Message,
    Redis,
    SafetensorsFile,
    SharedMemoryCopy,
    Store,
    Way,
)

FIRST_NUMBER_OF_PAIR = 1 << 40


@dataclass(frozen=True)
class Places:
    """Paths and addresses that the ways use."""

    socket: str
    tmpfs: str
    disk: str
    redis_url: str | None
    region_bytes: int  # as much as the store has: memcpy's own memory
    kept_tmpfs_bytes: int
    kept_disk_bytes: int


@dataclass(frozen=True)
class Passage:
    """Handover of one tensor, in seconds from the start of the producer's work."""

    started_at: float
    prepare_s: float  # before the start: a reservation, a directory
    ping_s: float
    copy_s: float
    written_s: float
    tensor_s: float  # the consumer has the tensor
    read_s: float  # the consumer has read every byte of it


def ways_of(places: Places, name: str) -> dict[str, Way]:
    ways: dict[str, Way] = {
        "message": Way(),
        "memcpy": Memcpy(places.region_bytes),
        "memcpy same": Memcpy(),
        "store": Store(places.socket, name),
        "shm copy": SharedMemoryCopy(places.kept_tmpfs_bytes),
        "st tmpfs": SafetensorsFile(Path(places.tmpfs), places.kept_tmpfs_bytes),
        "st disk": SafetensorsFile(Path(places.disk), places.kept_disk_bytes),
    }
    if places.redis_url is not None:
        ways["redis"] = Redis(places.redis_url, 2 * places.region_bytes)
    return ways


def send(pipe: Connection, message: Mapping[str, Any]) -> None:
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Connection) -> Message:
    message: Message = json.loads(pipe.recv_bytes())
    return message


def sum_of(tensor: torch.Tensor) -> int:
    """Sum of the tensor, which reads every byte."""
    return int(tensor.reshape(-1).view(torch.int64).sum())


def produce(steering: Connection, peer: Connection, places: Places, name: str) -> None:
    """Producer process: makes one tensor for each order."""
    torch.set_num_threads(1)
    gc.disable()
    ways = ways_of(places, name)
    tensor = torch.empty(0, WIDTH, dtype=torch.bfloat16)
    send(steering, {})
    while "way" in (order := receive(steering)):
        way = ways[order["way"]]
        if "rows" not in order:
            way.clear()
            send(steering, {})
            continue
        if tensor.shape[0] != order["rows"]:
            tensor = torch.randn(order["rows"], WIDTH).bfloat16()
        tensor.view(torch.int64)[0, 0] = order["number"]
        expected = sum_of(tensor)
        started_at = time.perf_counter()
        way.prepare(tensor, order["number"])
        prepared_at = time.perf_counter()
        message = way.produce(tensor, order["number"])
        written_at = way.written_at or time.perf_counter()
        if message is not None:
            send(peer, message)
        times = {"started_at": prepared_at, "written_at": written_at, "copy_s": way.copy_s}
        times |= {"prepare_s": prepared_at - started_at, "ping_s": way.ping_s}
        send(steering, times | {"sum": expected})
        receive(steering)
        if order["keeps"]:
            way.keep(order["number"], tensor.nbytes)
        else:
            way.retire(order["number"])
        send(steering, {})
    for way in ways.values():
        way.clear()
        way.close()


def consume(steering: Connection, peer: Connection, places: Places, name: str) -> None:
    """Consumer process: waits for each tensor, reads it whole, drops it."""
    torch.set_num_threads(1)
    gc.disable()
    warnings.filterwarnings("ignore", "The given buffer is not writable")  # what Redis gives
    ways = ways_of(places, name)
    send(steering, {})
    while "way" in (order := receive(steering)):
        way = ways[order["way"]]
        way.await_it(order["number"])
        send(steering, {})
        tensor = way.take(lambda: receive(peer), order["rows"])
        tensor_at = way.tensor_at or time.perf_counter()
        total = None if tensor is None else sum_of(tensor)
        read_at = time.perf_counter()
        has_tensor = tensor is not None
        del tensor
        if has_tensor:
            way.let_go()
        send(steering, {"tensor_at": tensor_at, "read_at": read_at, "sum": total})
    for way in ways.values():
        way.close()


class Pair:
    """A producer and its consumer, as the benchmark controls them."""

    def __init__(self, number: int) -> None:
        context = multiprocessing.get_context("fork")  # before any thread: nothing is imported twice
        self._number = number * FIRST_NUMBER_OF_PAIR
        self._producer, other_producer = context.Pipe()
        self._consumer, other_consumer = context.Pipe()
        ends = context.Pipe()
        self._processes = [
            context.Process(target=_begin, args=(produce, other_producer, ends[0], f"producer-{number}")),
            context.Process(target=_begin, args=(consume, other_consumer, ends[1], f"consumer-{number}")),
        ]
        for process in self._processes:
            process.start()

    def connect(self, places: Places) -> None:
        """Start connecting; `wait_ready` completes it."""
        for steering in (self._producer, self._consumer):
            send(steering, asdict(places))

    def wait_ready(self) -> None:
        receive(self._producer)
        receive(self._consumer)

    def order(self, way: str, rows: int, *, keeps: bool) -> None:
        """Order a handover; with `keeps` the tensor stays where it is, as in a cache."""
        self._number += 1
        self._order = {"way": way, "rows": rows, "number": self._number, "keeps": keeps}
        send(self._consumer, self._order)

    def go(self) -> None:
        receive(self._consumer)
        send(self._producer, self._order)

    def finish(self) -> Passage:
        """Wait for the handover; raises RuntimeError if another tensor arrived."""
        consumed = receive(self._consumer)  # first: nothing wakes this process before the end
        produced = receive(self._producer)
        send(self._producer, {})
        receive(self._producer)
        if consumed["sum"] not in (None, produced["sum"]):
            raise RuntimeError(f"{self._order['way']}: the tensor that arrived is another")
        started_at = produced["started_at"]
        return Passage(
            started_at,
            produced["prepare_s"],
            produced["ping_s"],
            produced["copy_s"],
            produced["written_at"] - started_at,
            consumed["tensor_at"] - started_at,
            consumed["read_at"] - started_at,
        )

    def clear(self, way: str) -> None:
        """Delete what the way has kept."""
        send(self._producer, {"way": way})
        receive(self._producer)

    def close(self) -> None:
        for steering in (self._producer, self._consumer):
            try:
                send(steering, {})
            except OSError:
                continue  # it has ended already
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join(10)


def _begin(work: Any, steering: Connection, peer: Connection, name: str) -> None:
    places = receive(steering)
    if places:
        work(steering, peer, Places(**places), name)
