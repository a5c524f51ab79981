"""The ways as the workers use them, in this process, through a store in another."""

import gc
import itertools
import threading
import time
from collections.abc import Callable

import torch

from gpu_rates.measuring import MIB, Compared, Passage, PlainCopy, Way
from tests.support.stores import StoreProcess
from triptych_common.protocol.store import Evict, Pinned, PinOrWatch, Reserve, Reserved, Seal, Unpin
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaDriver
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.cuda.transports import (
    PinnedReader,
    PinnedWriter,
    RegisteredRegion,
    SlabReader,
    SlabWriter,
    TorchDevice,
)
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import TensorReader, TensorWriter
from triptych_common.store_session import StoreSession

WIDTH = 4096
RELEASE_LIMIT_S = 10.0
COMPARED = {
    "cuda_ipc": Compared(out="device copy", in_=None),
    "pinned_shm": Compared(out="device to host", in_="host to device"),
}


class Peer:
    """Producer and consumer in one: CUDA opens a slab once in a process, so they share its mapping."""

    def __init__(self, store: StoreProcess, driver: CudaDriver) -> None:
        self.session: StoreSession = store.connect("bench-0/worker-0")
        welcome = self.session.welcome
        if welcome.slab is None:
            raise RuntimeError(f"the store has no device memory:\n{store.log()}")
        device = TorchDevice()
        self.memory = welcome.slab.memory
        self.slab = SlabMapping(driver, welcome.slab, welcome.generation)
        self.region = RegisteredRegion(
            driver, RegionMapping.open(welcome.region_path, welcome.region_num_bytes, populate=False)
        )
        self.releaser = EventReleaser(driver)
        self._ends: dict[str, tuple[str, TensorWriter, TensorReader]] = {
            "cuda_ipc": (
                self.memory,
                SlabWriter(driver, device, lambda: self.slab),
                SlabReader(device, lambda: self.slab, self.releaser),
            ),
            "pinned_shm": (
                "shm",
                PinnedWriter(driver, device, self.region),
                PinnedReader(driver, device, self.region, self.releaser),
            ),
        }

    def ways(self) -> list[Way]:
        return [StoreWay(self.session, name, *ends) for name, ends in self._ends.items()]

    def close(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        self.slab.retire()
        self.releaser.close()
        self.region.close()


class Order:
    """A reservation, as a worker receives it."""

    def __init__(self, mm_hash: str, reserved: Reserved) -> None:
        self.mm_hash = mm_hash
        self.generation = reserved.generation
        self.offset = reserved.offset


class StoreWay:
    """Reserve (not timed: it is made while the tensor is computed), write, seal, pin, open."""

    def __init__(
        self, session: StoreSession, name: str, memory: str, writer: TensorWriter, reader: TensorReader
    ) -> None:
        self.name = name
        self._session = session
        self._memory = memory
        self._writer = writer
        self._reader = reader
        self._number = 0

    def hand_over(self, tensor: torch.Tensor) -> Passage:
        self._number += 1
        mm_hash = f"{self.name.encode().hex():0<48}{self._number:016x}"
        reserved = self._session.request(
            Reserve(seq=0, mm_hash=mm_hash, spec=tensor_spec(tensor), memory=self._memory)
        )
        if not isinstance(reserved, Reserved):
            raise TypeError(f"no reservation: {reserved}")
        order = Order(mm_hash, reserved)
        torch.cuda.synchronize()
        times = [time.perf_counter()]
        self._writer.write(order, tensor)
        times.append(time.perf_counter())
        self._session.request(Seal(seq=0, reservation_id=reserved.reservation_id))
        pinned = self._session.request(PinOrWatch(seq=0, mm_hash=mm_hash))
        if not isinstance(pinned, Pinned):
            raise TypeError(f"no pin: {pinned}")
        times.append(time.perf_counter())
        before = torch.cuda.memory_allocated()
        released = threading.Event()
        view = self._reader.open(pinned.descriptor, released.set)
        torch.cuda.synchronize()
        times.append(time.perf_counter())
        if self._memory != "shm" and torch.cuda.memory_allocated() != before:
            raise RuntimeError(f"{self.name}: the consumer took memory of its own")
        if not torch.equal(view, tensor):
            raise RuntimeError(f"{self.name}: other bytes arrived")
        del view
        gc.collect()
        if not released.wait(RELEASE_LIMIT_S):
            raise RuntimeError("the pin did not end")
        self._session.request(Unpin(seq=0, pin_id=pinned.pin_id))
        self._session.request(Evict(seq=0, mm_hash=mm_hash))
        return Passage(*(late - early for early, late in itertools.pairwise(times)))


def plain_copies() -> dict[str, PlainCopy]:
    """torch's own copies, between memories that exist."""
    host: dict[int, torch.Tensor] = {}

    def pinned(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.nbytes not in host:
            host.clear()
            host[tensor.nbytes] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host[tensor.nbytes]

    def timed(copy: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def on_device(tensor: torch.Tensor) -> float:
        target = torch.empty_like(tensor)
        return timed(lambda: target.copy_(tensor, non_blocking=True))

    def to_host(tensor: torch.Tensor) -> float:
        target = pinned(tensor)
        return timed(lambda: target.copy_(tensor, non_blocking=True))

    def to_device(tensor: torch.Tensor) -> float:
        source, target = pinned(tensor), torch.empty_like(tensor)
        return timed(lambda: target.copy_(source, non_blocking=True))

    return {"device copy": on_device, "device to host": to_host, "host to device": to_device}


def make_tensor(mib: float) -> torch.Tensor:
    rows = max(1, int(mib * MIB) // (2 * WIDTH))
    return torch.randn(rows, WIDTH, device="cuda").bfloat16()
