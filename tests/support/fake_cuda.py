"""A GPU in host memory, honest about order: what is put on a stream happens when the stream is advanced.

One `FakeGpu` is the machine's; each `FakeDriver` is one process's view of it. A mapping of another process's
memory has an address of its own, as with CUDA. A copy reads its source when it runs, not when it is asked
for, so that every ordering that the code forgets shows as wrong bytes.
"""

import ctypes
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.transports import DeviceRange
from triptych_common.region.mapping import address_of

UUID = "GPU-00000000-0000-0000-0000-00000000000a"
WAIT_S = 5.0
Step = Callable[[], bool]
"""Done? False: it cannot run yet, and what is behind it waits."""


@dataclass
class FakeGpu:
    """Streams, events and allocations. Events are done when their stream has come to them."""

    runs_by_itself: bool = False  # as a real one; else the test advances the streams
    memory: dict[bytes, int] = field(default_factory=dict)  # handle -> memfd
    streams: dict[int, deque[Step]] = field(default_factory=lambda: {0: deque()})
    events: dict[int, int] = field(default_factory=dict)  # event -> records that are not done
    done: threading.Condition = field(default_factory=threading.Condition)
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def put(self, stream: int, step: Step) -> None:
        with self.done:
            self.streams[stream].append(step)
        if self.runs_by_itself:
            self.advance_all()

    def advance(self, stream: int) -> None:
        """Run what is on the stream, as far as it can."""
        with self.done:
            steps = self.streams[stream]
            while steps and steps[0]():
                steps.popleft()
            self.done.notify_all()

    def advance_all(self) -> None:
        for _ in self.streams:
            for stream in list(self.streams):
                self.advance(stream)


class FakeDriver:
    """`CudaDriver` of one process."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._maps: dict[int, mmap.mmap] = {}
        self._handles: dict[int, bytes] = {}
        self.known: dict[int, int] = {}  # address -> bytes that CUDA may touch
        self.registered: list[int] = []
        self.num_opens = 0
        self.bound_threads: set[int] = set()
        self.num_destroyed = 0
        self.fail: str | None = None  # name of a call that fails from now on

    def bind_thread(self) -> None:
        self.bound_threads.add(threading.get_ident())

    def device_uuid(self) -> str:
        return UUID

    def malloc(self, num_bytes: int) -> int:
        self._check("malloc")
        handle = os.urandom(64)
        fd = self._gpu.memory[handle] = os.memfd_create("fake-gpu")
        os.ftruncate(fd, num_bytes)
        address = self._map(fd, num_bytes)
        self._handles[address] = handle
        return address

    def free(self, address: int) -> None:
        os.close(self._gpu.memory.pop(self._handles.pop(address)))
        self._unmap(address)

    def ipc_get_handle(self, address: int) -> bytes:
        self._check("ipc_get_handle")
        return self._handles[address]

    def ipc_open(self, handle: bytes) -> int:
        self._check("ipc_open")
        if handle not in self._gpu.memory:
            raise CudaError("ipc_open: invalid resource handle")
        self.num_opens += 1
        fd = self._gpu.memory[handle]
        return self._map(fd, os.fstat(fd).st_size)

    def ipc_close(self, address: int) -> None:
        self._unmap(address)

    def host_register(self, address: int, num_bytes: int) -> None:
        self._check("host_register")
        self.registered.append(address)
        self.known[address] = num_bytes

    def host_unregister(self, address: int) -> None:
        self.registered.remove(address)
        del self.known[address]

    def memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        for address in (target, source):
            inside = any(at <= address and address + num_bytes <= at + n for at, n in self.known.items())
            if not inside:
                raise CudaError(f"memcpy_async: {num_bytes} bytes at {address:#x} are not CUDA's")

        def copy() -> bool:
            ctypes.memmove(target, source, num_bytes)
            return True

        self._gpu.put(stream, copy)

    def stream_create(self) -> int:
        stream = next(self._gpu.ids)
        self._gpu.streams[stream] = deque()
        return stream

    def stream_destroy(self, stream: int) -> None:
        del self._gpu.streams[stream]

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._gpu.put(stream, lambda: self._gpu.events.get(event, 0) == 0)

    def event_create(self) -> int:
        self._check("event_create")
        event = next(self._gpu.ids)
        self._gpu.events[event] = 0
        return event

    def event_record(self, event: int, stream: int) -> None:
        self._check("event_record")
        with self._gpu.done:
            self._gpu.events[event] += 1

        def reach() -> bool:
            self._gpu.events[event] -= 1
            return True

        self._gpu.put(stream, reach)

    def event_query(self, event: int) -> bool:
        return self._gpu.events[event] == 0

    def event_synchronize(self, event: int) -> None:
        with self._gpu.done:
            if not self._gpu.done.wait_for(lambda: self._gpu.events[event] == 0, WAIT_S):
                raise CudaError("event_synchronize: nobody advances the stream")

    def event_destroy(self, event: int) -> None:
        """As with CUDA, what waits for it goes on waiting; so it is only forgotten."""
        self.num_destroyed += 1

    def _map(self, fd: int, num_bytes: int) -> int:
        memory = mmap.mmap(fd, num_bytes)
        address = address_of(memory)
        self._maps[address] = memory
        self.known[address] = num_bytes
        return address

    def _unmap(self, address: int) -> None:
        del self._maps[address], self.known[address]

    def _check(self, name: str) -> None:
        if self.fail == name:
            raise CudaError(f"{name}: told to fail")


class _HostArray:
    """The same memory as numpy takes it; holds `memory`, as torch holds what it was given."""

    def __init__(self, memory: DeviceRange) -> None:
        self.memory = memory
        self.__array_interface__ = {**memory.__cuda_array_interface__, "version": 3}


class FakeDevice:
    """`TensorDevice`: tensors of the CPU play those of the GPU."""

    def __init__(self, driver: FakeDriver, stream: int = 0) -> None:
        self._driver = driver
        self.stream = stream

    def current_stream(self) -> int:
        return self.stream

    def empty(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return self.own(torch.zeros(shape, dtype=dtype))

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` is on the GPU."""
        self._driver.known[tensor.data_ptr()] = tensor.nbytes
        return tensor

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_HostArray(memory)))
