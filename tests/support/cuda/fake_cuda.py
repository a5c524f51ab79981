"""A GPU in host memory that keeps CUDA's rules, and reports which one was broken.

What is put on a stream happens when the stream is advanced: a copy reads its source when it runs, not when it
is asked for, so that every ordering that the code forgets shows as wrong bytes.

One `FakeGpu` is the machine's; each `FakeDriver` is one process's view of it, with addresses of its own. What
CUDA leaves undefined, and code may therefore do unseen, is noted in `FakeGpu.breaches` besides being raised
where a call did it; tests check the list in the end (`assert_no_breach`):

    a handle is opened once per process, and never by the process that owns the memory
    memory of a process that has died stays as long as it is mapped, and cannot be opened any more
    memory is not freed while another process has it mapped
    nothing is unmapped, freed or unregistered that a view lives of, or that a stream has yet to use
    copies touch what is mapped when they run; streams are not used after their end
    a copy goes into memory of its own stream's pool: other pools hand out what kernels may still use
    a copy touches one registration of host memory, not two
    a thread that has not chosen its GPU is on GPU 0, whatever others have chosen
"""

import ctypes
import itertools
import mmap
import os
import threading
import weakref
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
Run = Callable[[], bool]
"""Done? False: it cannot run yet, and what is behind it waits."""


@dataclass(frozen=True)
class Step:
    """On a stream. `uses`: (address, bytes) that it reads or writes when it runs."""

    run: Run
    uses: tuple[tuple[int, int], ...] = ()


@dataclass
class Allocation:
    """Memory of `malloc`."""

    fd: int
    num_bytes: int
    owner: "FakeDriver"
    importers: set["FakeDriver"] = field(default_factory=set)


@dataclass
class FakeGpu:
    """Streams, events and allocations. Events are done when their stream has come to them."""

    runs_by_itself: bool = False  # as a real one; else the test advances the streams
    uuid: str = UUID
    is_shared_by_mps: bool = False
    num_multiprocessors: int = 132
    capacity: int | None = None  # bytes; None: all that are asked for
    num_refused: int = 0  # allocations
    memory: dict[bytes, Allocation] = field(default_factory=dict)  # by handle
    streams: dict[int, deque[Step]] = field(default_factory=lambda: {0: deque()})
    events: dict[int, int] = field(default_factory=dict)  # event -> records that are not done
    breaches: list[str] = field(default_factory=list)
    done: threading.Condition = field(default_factory=threading.Condition)
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def put(self, stream: int, run: Run, *uses: tuple[int, int]) -> None:
        with self.done:
            if stream not in self.streams:
                raise self.breach("use of a stream that was destroyed")
            self.streams[stream].append(Step(run, uses))
        if self.runs_by_itself:
            self.advance_all()

    def advance(self, stream: int) -> None:
        """Run what is on the stream, as far as it can."""
        with self.done:
            steps = self.streams[stream]
            while steps and steps[0].run():
                steps.popleft()
            self.done.notify_all()

    def advance_all(self) -> None:
        for _ in self.streams:
            for stream in list(self.streams):
                self.advance(stream)

    def is_to_be_used(self, address: int, num_bytes: int) -> bool:
        """Will a step that has not run touch these bytes?"""
        with self.done:
            uses = [use for steps in self.streams.values() for step in steps for use in step.uses]
        return any(at < address + num_bytes and address < at + n for at, n in uses)

    @property
    def num_bytes_held(self) -> int:
        """Memory that is gone for others: of living owners, and of dead ones that a process has mapped."""
        return sum(each.num_bytes for each in self.memory.values())

    def breach(self, what: str) -> CudaError:
        self.breaches.append(what)
        return CudaError(what)

    def assert_no_breach(self) -> None:
        assert not self.breaches, "; ".join(self.breaches)


class FakeDriver:
    """`CudaDriver` of one process. `index`: number of its GPU; only the thread that made it has chosen it."""

    def __init__(self, gpu: FakeGpu, index: int = 0) -> None:
        self._gpu = gpu
        self._index = index
        self._maps: dict[int, mmap.mmap] = {}
        self._handles: dict[int, bytes] = {}  # of memory that is mapped here, by its address
        self._views: list[weakref.ref[DeviceRange]] = []
        self._is_dead = False
        self.known: dict[int, int] = {}  # address -> bytes that CUDA may touch
        self.registered: list[int] = []
        self.pools: dict[int, int] = {}  # address -> stream whose pool of torch's it comes from
        self.num_opens = 0
        self.num_closes = 0
        self.bound_threads: set[int] = set()
        self.num_destroyed = 0
        self.fail: str | None = None  # name of a call that fails from now on
        self.bind_thread()

    def bind_thread(self) -> None:
        self.bound_threads.add(threading.get_ident())

    def device_uuid(self) -> str:
        return self._gpu.uuid

    def pci_bus_id(self) -> str:
        return "0000:3B:00.0"

    def is_mps_client(self) -> bool:
        return self._gpu.is_shared_by_mps

    def num_multiprocessors(self) -> int:
        return self._gpu.num_multiprocessors

    def die(self) -> None:
        """The process ends: what it had mapped is unmapped, what it had allocated is opened no more."""
        self._is_dead = True
        for address in list(self._handles):
            handle = self._handles[address]
            self._unmap(address)
            allocation = self._gpu.memory[handle]
            allocation.importers.discard(self)
            self._drop_unused(handle)

    # ---- memory ----
    def malloc(self, num_bytes: int) -> int:
        self._check("malloc")
        if self._gpu.capacity is not None and self._gpu.num_bytes_held + num_bytes > self._gpu.capacity:
            self._gpu.num_refused += 1
            raise CudaError("malloc: out of memory")
        handle = os.urandom(64)
        fd = os.memfd_create("fake-gpu")
        os.ftruncate(fd, num_bytes)
        self._gpu.memory[handle] = Allocation(fd, num_bytes, self)
        return self._map(handle)

    def free(self, address: int) -> None:
        self._check("free")
        handle = self._handles.get(address)
        if handle is None or self._gpu.memory[handle].owner is not self:
            raise self._gpu.breach("free of what this process has not allocated")
        if self._gpu.memory[handle].importers:
            raise self._gpu.breach("free of memory that another process has mapped")
        self._check_unused("free", address)
        self._unmap(address)
        os.close(self._gpu.memory.pop(handle).fd)

    def ipc_get_handle(self, address: int) -> bytes:
        self._check("ipc_get_handle")
        return self._handles[address]

    def ipc_open(self, handle: bytes) -> int:
        self._check("ipc_open")
        allocation = self._gpu.memory.get(handle)
        if allocation is None or allocation.owner._is_dead:
            raise CudaError("ipc_open: invalid resource handle")  # no breach: no caller can know it before
        if allocation.owner is self:
            raise self._gpu.breach("ipc_open by the process that owns the memory")
        if self in allocation.importers:
            raise self._gpu.breach("ipc_open of a handle that this process has open")
        self.num_opens += 1
        allocation.importers.add(self)
        return self._map(handle)

    def ipc_close(self, address: int) -> None:
        self._check("ipc_close")
        handle = self._handles.get(address)
        if handle is None or self._gpu.memory[handle].owner is self:
            raise self._gpu.breach("ipc_close of what was not opened, or was closed before")
        self._check_unused("ipc_close", address)
        self._unmap(address)
        self._gpu.memory[handle].importers.remove(self)
        self.num_closes += 1
        self._drop_unused(handle)

    def host_register(self, address: int, num_bytes: int) -> None:
        self._check("host_register")
        if address in self.registered:
            raise self._gpu.breach("host_register of what is registered")
        self.registered.append(address)
        self.known[address] = num_bytes

    def host_unregister(self, address: int) -> None:
        self._check("host_unregister")
        if self._gpu.is_to_be_used(address, self.known[address]):
            raise self._gpu.breach("host_unregister of what a stream is to use")
        self.registered.remove(address)
        del self.known[address]

    def memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._check("memcpy_async")
        if not self._is_known(target, num_bytes) or not self._is_known(source, num_bytes):
            raise self._gpu.breach(f"memcpy_async of {num_bytes} bytes that are not CUDA's")

        if self.pools.get(target, stream) != stream:
            raise self._gpu.breach("memcpy_async into memory of another stream's pool")

        def copy() -> bool:
            if self._is_known(target, num_bytes) and self._is_known(source, num_bytes):
                ctypes.memmove(target, source, num_bytes)
            else:
                self._gpu.breach("copy of memory that was unmapped before it ran")
            return True

        self._gpu.put(stream, copy, (target, num_bytes), (source, num_bytes))

    # ---- order ----
    def stream_create(self) -> int:
        self._check("stream_create")
        stream = next(self._gpu.ids)
        self._gpu.streams[stream] = deque()
        return stream

    def stream_destroy(self, stream: int) -> None:
        self._check("stream_destroy")
        del self._gpu.streams[stream]

    def stream_synchronize(self, stream: int) -> None:
        """A thread that waits for a stream lets the GPU run."""
        self._check("stream_synchronize")
        self._gpu.advance_all()
        with self._gpu.done:
            if not self._gpu.done.wait_for(lambda: not self._gpu.streams[stream], WAIT_S):
                raise CudaError("stream_synchronize: no thread advances what the stream waits for")

    def stream_wait_event(self, stream: int, event: int) -> None:
        self._check("stream_wait_event")
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
        self._check("event_synchronize")
        with self._gpu.done:
            if not self._gpu.done.wait_for(lambda: self._gpu.events[event] == 0, WAIT_S):
                raise CudaError("event_synchronize: no thread advances the stream")

    def event_destroy(self, event: int) -> None:
        """As with CUDA, what waits for it goes on waiting; so it is only forgotten."""
        self._check("event_destroy")
        self.num_destroyed += 1

    # ---- how the rules are kept ----
    def note_view(self, memory: DeviceRange) -> None:
        """torch holds on to `memory` from now on."""
        self._views.append(weakref.ref(memory))

    def _check(self, name: str) -> None:
        if self._is_dead:
            raise self._gpu.breach(f"{name} by a process that has ended")
        if self._index and threading.get_ident() not in self.bound_threads:
            raise self._gpu.breach(f"{name} on another GPU: the thread has not chosen one")
        if self.fail == name:
            raise CudaError(f"{name}: set to fail")

    def _check_unused(self, name: str, address: int) -> None:
        num_bytes = self.known[address]
        if self._gpu.is_to_be_used(address, num_bytes):
            raise self._gpu.breach(f"{name} of memory that a stream is to use")
        alive = [view for each in self._views if (view := each()) is not None]
        if any(address <= view.address < address + num_bytes for view in alive):
            raise self._gpu.breach(f"{name} of memory that a view lives of")

    def _is_known(self, address: int, num_bytes: int) -> bool:
        return any(at <= address and address + num_bytes <= at + n for at, n in self.known.items())

    def _drop_unused(self, handle: bytes) -> None:
        """Of a dead owner, once no process has it mapped."""
        allocation = self._gpu.memory[handle]
        if allocation.owner._is_dead and not allocation.importers:
            os.close(self._gpu.memory.pop(handle).fd)

    def _map(self, handle: bytes) -> int:
        allocation = self._gpu.memory[handle]
        memory = mmap.mmap(allocation.fd, allocation.num_bytes)
        address = address_of(memory)
        self._maps[address] = memory
        self._handles[address] = handle
        self.known[address] = allocation.num_bytes
        return address

    def _unmap(self, address: int) -> None:
        del self._maps[address], self._handles[address], self.known[address]


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

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        tensor = self.own(torch.zeros(shape, dtype=dtype))
        self._driver.pools[tensor.data_ptr()] = self.stream if stream is None else stream
        return tensor

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` is on the GPU."""
        self._driver.known[tensor.data_ptr()] = tensor.nbytes
        self._driver.pools.pop(tensor.data_ptr(), None)  # of an earlier tensor at this address
        return tensor

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        self._driver.note_view(memory)
        return torch.from_numpy(np.asarray(_HostArray(memory)))
