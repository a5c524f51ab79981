"""The ways a tensor can take from one process to another. Each has a producer's and a consumer's half.

A producer's `produce` leaves the tensor somewhere and returns what the consumer must know; a pipe carries
it, except for the store, whose own push does. Afterwards the producer retires it (it is gone at once) or
keeps it, as a cache does. `copy_s` is the time of the copy alone, `written_at` when the consumer is about
to be told, `tensor_at` when it has the tensor; where 0, when `produce` and `take` return.
"""

import ctypes
import queue
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import redis
import torch
from safetensors.torch import load_file, save_file

from triptych_common.protocol.store import (
    EntrySealed,
    Evict,
    Ping,
    PinOrWatch,
    Reserve,
    Reserved,
    Seal,
    Unpin,
)
from triptych_common.region import RegionMapping
from triptych_common.region.tensor_view import tensor_spec, tensor_view, write_tensor
from triptych_common.store_session import Push, StoreSession

WIDTH = 4096
TIMEOUT_S = 60.0
Message = dict[str, Any]


class Way:
    """Base class of the ways, and the empty round trip."""

    copy_s = 0.0
    ping_s = 0.0  # of the store, just before
    written_at = 0.0
    tensor_at = 0.0

    def prepare(self, tensor: torch.Tensor, number: int) -> None:
        """Producer, before the clock runs: do what can be done while the tensor is being computed."""

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        """Leave the tensor (`[rows, WIDTH]`, bfloat16); None if the way notifies the consumer itself."""
        return {}

    def retire(self, number: int) -> None:
        """Producer: clean up after the consumer is done."""

    def keep(self, number: int, num_bytes: int) -> None:
        """Producer: keep the tensor where it is, as a cache does, within the way's limit."""

    def clear(self) -> None:
        """Producer: delete everything kept."""

    def await_it(self, number: int) -> None:
        """Consumer: prepare, before the clock runs."""

    def take(self, read_message: Callable[[], Message], rows: int) -> torch.Tensor | None:
        """Consumer: return the tensor as soon as it is there."""
        read_message()
        return None

    def let_go(self) -> None:
        """Consumer: clean up, after the clock has stopped and the tensor was dropped."""

    def close(self) -> None:
        """Clean up at the end of the process."""


class Kept:
    """Kept tensors, oldest first, up to `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._numbers: deque[tuple[int, int]] = deque()

    def add(self, number: int, num_bytes: int) -> list[int]:
        """Add a tensor; returns the numbers of those that must go for it."""
        self._numbers.append((number, num_bytes))
        self._num_bytes += num_bytes
        gone = []
        while self._num_bytes > self._most_bytes:
            oldest, oldest_bytes = self._numbers.popleft()
            self._num_bytes -= oldest_bytes
            gone.append(oldest)
        return gone

    def take_all(self) -> list[int]:
        numbers = [number for number, _ in self._numbers]
        self._numbers.clear()
        self._num_bytes = 0
        return numbers


class Memcpy(Way):
    """libc's memmove of the same bytes within the producer, to warm memory of its own: the floor.

    `num_bytes` of memory are used in turn, as the places of a cache are; with 0 it is the same place each
    time, so that it may still be in the processor's cache.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._num_bytes = num_bytes
        self._warm = torch.empty(0, dtype=torch.bfloat16)
        self._next = 0

    def prepare(self, tensor: torch.Tensor, number: int) -> None:
        numel = max(tensor.numel(), self._num_bytes // 2)
        if self._warm.numel() < tensor.numel() or (self._num_bytes == 0 and self._warm.numel() != numel):
            self._warm = torch.zeros(numel, dtype=torch.bfloat16)
        if self._next + tensor.numel() > self._warm.numel():
            self._next = 0

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        target = self._warm.data_ptr() + 2 * self._next
        started_at = time.perf_counter()
        ctypes.memmove(target, tensor.data_ptr(), tensor.nbytes)
        self.copy_s = time.perf_counter() - started_at
        self._next += tensor.numel()
        return {}


class Store(Way):
    """One copy into a reservation in the region, seal; the consumer gets a view of the region itself.

    The view is made where the push arrives, in the session's thread, as the push may be used there.
    """

    def __init__(self, socket: str, name: str) -> None:
        self._views: queue.SimpleQueue[tuple[torch.Tensor, int, float]] = queue.SimpleQueue()
        self._session = StoreSession.connect(socket, name, on_push=self._on_push)
        welcome = self._session.welcome
        self._mapping = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
        self._mapping.wait_populated(TIMEOUT_S)
        self._mapping.prepare_writes(TIMEOUT_S)
        self._pin_id = 0
        self._reserved: Reserved | None = None

    def prepare(self, tensor: torch.Tensor, number: int) -> None:
        started_at = time.perf_counter()
        self._session.request(Ping(seq=0))
        self.ping_s = time.perf_counter() - started_at
        reserve = Reserve(seq=0, mm_hash=f"{number:064x}", spec=tensor_spec(tensor), may_use_reserve=True)
        reserved = self._session.request(reserve)
        if not isinstance(reserved, Reserved):
            raise TypeError(f"{reserved.kind} is no reservation")
        self._reserved = reserved

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        reserved = self._reserved
        if reserved is None:
            raise RuntimeError("nothing was reserved")
        started_at = time.perf_counter()
        write_tensor(self._mapping, reserved.offset, tensor)
        self.written_at = time.perf_counter()
        self.copy_s = self.written_at - started_at
        self._session.submit(Seal(seq=0, reservation_id=reserved.reservation_id))
        return None

    def retire(self, number: int) -> None:
        """Evict the tensor, so that the next one gets the same, warm blocks, as in a long-running store."""
        self._session.request(Evict(seq=0, mm_hash=f"{number:064x}"))

    def await_it(self, number: int) -> None:
        self._session.request(PinOrWatch(seq=0, mm_hash=f"{number:064x}"))

    def take(self, read_message: Callable[[], Message], rows: int) -> torch.Tensor | None:
        tensor, self._pin_id, self.tensor_at = self._views.get(timeout=TIMEOUT_S)
        return tensor

    def _on_push(self, push: Push) -> None:
        if isinstance(push, EntrySealed):
            view = tensor_view(self._mapping, push.descriptor)
            self._views.put((view, push.pin_id, time.perf_counter()))

    def let_go(self) -> None:
        self._session.request(Unpin(seq=0, pin_id=self._pin_id))

    def close(self) -> None:
        self._session.close()


class SharedMemoryCopy(Way):
    """multiprocessing.shared_memory: a block for each tensor, copied in, copied out."""

    def __init__(self, most_kept_bytes: int) -> None:
        self._kept = Kept(most_kept_bytes)
        self._memories: dict[int, SharedMemory] = {}

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        memory = self._memories[number] = SharedMemory(create=True, size=tensor.nbytes)
        started_at = time.perf_counter()
        target = torch.frombuffer(memory.buf, dtype=torch.bfloat16, count=tensor.numel())
        target.view(tensor.shape).copy_(tensor)
        self.copy_s = time.perf_counter() - started_at
        return {"name": memory.name}

    def retire(self, number: int) -> None:
        memory = self._memories.pop(number, None)
        if memory is not None:
            memory.close()
            memory.unlink()

    def keep(self, number: int, num_bytes: int) -> None:
        for each in self._kept.add(number, num_bytes):
            self.retire(each)

    def take(self, read_message: Callable[[], Message], rows: int) -> torch.Tensor | None:
        memory = SharedMemory(read_message()["name"])
        copy = torch.frombuffer(memory.buf, dtype=torch.bfloat16, count=rows * WIDTH).clone()
        memory.close()
        return copy.view(rows, WIDTH)

    def clear(self) -> None:
        for number in self._kept.take_all():
            self.retire(number)


class SafetensorsFile(Way):
    """A file for each tensor, saved and loaded as vLLM's ECExampleConnector does.

    That one never deletes a file; here the oldest go at the limit.
    """

    def __init__(self, directory: Path, most_kept_bytes: int) -> None:
        self._directory = directory
        self._kept = Kept(most_kept_bytes)

    def prepare(self, tensor: torch.Tensor, number: int) -> None:
        self._path(number).parent.mkdir()

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        path = self._path(number)
        save_file({"ec_cache": tensor}, path)
        return {"path": str(path)}

    def retire(self, number: int) -> None:
        self._path(number).unlink()
        self._path(number).parent.rmdir()

    def keep(self, number: int, num_bytes: int) -> None:
        for each in self._kept.add(number, num_bytes):
            self.retire(each)

    def take(self, read_message: Callable[[], Message], rows: int) -> torch.Tensor | None:
        tensor: torch.Tensor = load_file(read_message()["path"], device="cpu")["ec_cache"]
        return tensor

    def clear(self) -> None:
        for number in self._kept.take_all():
            self.retire(number)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:064x}" / "encoder_cache.safetensors"


class Redis(Way):
    """SET by the producer, GET by the consumer, through Redis' Unix socket; Redis evicts kept tensors."""

    def __init__(self, url: str, most_kept_bytes: int) -> None:
        self._redis: Any = redis.Redis.from_url(url)
        self._kept = Kept(most_kept_bytes)

    def produce(self, tensor: torch.Tensor, number: int) -> Message | None:
        self._redis.set(str(number), memoryview(tensor.view(torch.uint8).numpy()).cast("B"))
        return {"key": str(number)}

    def retire(self, number: int) -> None:
        self._redis.delete(str(number))

    def keep(self, number: int, num_bytes: int) -> None:
        """No effect on the own Redis, which has a limit; another Redis may have none."""
        for each in self._kept.add(number, num_bytes):
            self.retire(each)

    def clear(self) -> None:
        for number in self._kept.take_all():
            self.retire(number)

    def take(self, read_message: Callable[[], Message], rows: int) -> torch.Tensor | None:
        data = self._redis.get(read_message()["key"])
        return torch.frombuffer(data, dtype=torch.bfloat16).view(rows, WIDTH)

    def close(self) -> None:
        self._redis.close()
