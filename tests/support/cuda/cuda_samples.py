"""One tensor on a fake GPU, as the tests of its transports order, write and find it."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import Descriptor, SlabInfo
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.cuda.transports import (
    SlabWriter,
)
from triptych_common.region.tensor_view import tensor_spec

HASH = "ab" * 32
GENERATION = 7
SLAB_BYTES, OFFSET = 1 << 20, 1 << 16
WAIT_S = 5.0


@dataclass(frozen=True)
class Order:
    mm_hash: str = HASH
    generation: int = GENERATION
    offset: int = OFFSET


def descriptor(tensor: torch.Tensor, memory: str, generation: int = GENERATION) -> Descriptor:
    return Descriptor(
        mm_hash=HASH, spec=tensor_spec(tensor), offset=OFFSET, generation=generation, memory=memory
    )


def written(gpu: FakeGpu, write: Callable[[], None]) -> None:
    """Do `write`, which waits for the GPU."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(write)
        for _ in range(1000):
            gpu.advance_all()
            if future.done():
                break
            threading.Event().wait(0.001)
        future.result(WAIT_S)


def put(gpu: FakeGpu, slab: SlabInfo, tensor: torch.Tensor) -> None:
    """Another process writes `tensor`."""
    producer = FakeDriver(gpu)
    device, mapping = FakeDevice(producer), SlabMapping(producer, slab, GENERATION)
    writer = SlabWriter(producer, device, lambda: mapping)
    written(gpu, lambda: writer.write(Order(), device.own(tensor)))
    mapping.retire()


def mapping_address(driver: FakeDriver) -> int:
    (address,) = [each for each, num_bytes in driver.known.items() if num_bytes == SLAB_BYTES]
    return address
