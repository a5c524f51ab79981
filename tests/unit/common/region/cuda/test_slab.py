"""Transport `cuda_ipc` on a fake GPU that keeps its streams' order: what is copied when, what ends when."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.cuda.cuda_samples import (
    GENERATION,
    OFFSET,
    SLAB_BYTES,
    WAIT_S,
    Order,
    descriptor,
    mapping_address,
    put,
    written,
)
from tests.support.cuda.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import SlabInfo
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import DeviceSlab, SlabMapping
from triptych_common.region.cuda.transports import DeviceRange, SlabReader, SlabWriter
from triptych_common.region.fence import StaleDescriptorError, StaleReservationError
from triptych_common.region.tensor_view import address_range


# ---- cuda_ipc ------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_view_is_the_slab_itself(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    tensor = torch.randn(33, 48).to(dtype)
    put(gpu, slab, tensor)
    mapping = SlabMapping(driver, slab, GENERATION)
    reader = SlabReader(device, lambda: mapping, releaser)

    view = reader.open(descriptor(tensor, slab.memory), lambda: None)

    assert view.shape == tensor.shape
    assert torch.equal(view, tensor)
    assert address_range(view)[0] == mapping.address + OFFSET
    assert address_range(view)[1] <= mapping.address + SLAB_BYTES
    reader.open(descriptor(tensor, slab.memory), lambda: None)
    assert driver.num_opens == 1


def test_a_write_returns_when_the_bytes_are_there(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice
) -> None:
    """Not before: a kernel that makes the tensor may still run."""
    tensor = device.own(torch.zeros(16, 16))
    is_made = threading.Event()

    def make() -> bool:
        if is_made.is_set():
            tensor.fill_(3.0)
        return is_made.is_set()

    gpu.put(0, make)
    mapping = SlabMapping(driver, slab, GENERATION)
    writer = SlabWriter(driver, device, lambda: mapping)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(writer.write, Order(), tensor)
        threading.Event().wait(0.05)
        gpu.advance_all()
        assert not future.done()
        is_made.set()
        while not future.done():
            gpu.advance_all()
        future.result()
    elsewhere = FakeDriver(gpu)
    other = SlabMapping(elsewhere, slab, GENERATION)
    reader = SlabReader(FakeDevice(elsewhere), lambda: other, EventReleaser(elsewhere))
    assert torch.equal(reader.open(descriptor(tensor, slab.memory), lambda: None), torch.full((16, 16), 3.0))


def test_a_view_is_released_after_the_kernels_that_read_it(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    tensor = torch.randn(8, 8)
    put(gpu, slab, tensor)
    mapping = SlabMapping(driver, slab, GENERATION)
    released = threading.Event()
    device.stream = driver.stream_create()
    view = SlabReader(device, lambda: mapping, releaser).open(descriptor(tensor, slab.memory), released.set)
    row, compute = view[2], device.stream
    device.stream = 0  # whatever stream is current where the finalizer runs
    read: list[bool] = []
    gpu.put(compute, lambda: bool(read))

    del view
    gc.collect()
    assert row.sum() == tensor[2].sum()
    held = [row]
    del row
    thread = threading.Thread(target=held.clear)  # dropped in another thread
    thread.start()
    thread.join()
    gpu.advance_all()
    assert not released.wait(0.05), "a kernel still reads"
    read.append(True)
    gpu.advance(compute)
    assert released.wait(WAIT_S)
    assert driver.bound_threads, "the thread that waits has the GPU"


def test_a_descriptor_of_an_earlier_store_is_refused(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    tensor = torch.randn(8, 8)
    later = SlabMapping(driver, slab, GENERATION + 1)
    reader = SlabReader(device, lambda: later, releaser)
    with pytest.raises(StaleDescriptorError):
        reader.open(descriptor(tensor, slab.memory), lambda: None)
    other_device = f"cuda:{UUID[:-1]}b"
    with pytest.raises(StaleDescriptorError):
        reader.open(descriptor(tensor, other_device, GENERATION + 1), lambda: None)


def test_nothing_is_written_outside_the_slab(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice
) -> None:
    mapping = SlabMapping(driver, slab, GENERATION)
    writer = SlabWriter(driver, device, lambda: mapping)
    with pytest.raises(ValueError, match="outside"):
        writer.write(Order(offset=SLAB_BYTES - 4), device.own(torch.zeros(4, 4)))


def test_a_slab_that_cannot_be_shared_is_given_back(gpu: FakeGpu, driver: FakeDriver) -> None:
    driver.fail = "ipc_get_handle"
    with pytest.raises(CudaError):
        DeviceSlab(driver, SLAB_BYTES)
    assert not gpu.memory


# ---- orders and slabs of a store that is gone ----------------------------------------------------
def test_an_order_of_an_earlier_store_is_not_written(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice
) -> None:
    """Offsets begin at 0 in every slab: another item lies there by now."""
    mapping = SlabMapping(driver, slab, GENERATION + 1)
    writer = SlabWriter(driver, device, lambda: mapping)
    with pytest.raises(StaleReservationError):
        written(gpu, lambda: writer.write(Order(generation=GENERATION), device.own(torch.ones(4, 4))))
    assert not driver.num_opens, "nothing was even mapped"


def test_a_slab_that_is_retired_is_unmapped_behind_the_kernels_that_read_it(
    gpu: FakeGpu, store: FakeDriver, slab: SlabInfo, driver: FakeDriver, device: FakeDevice,
    releaser: EventReleaser,
) -> None:  # fmt: skip
    tensor = torch.randn(8, 8)
    put(gpu, slab, tensor)
    mapping, released = SlabMapping(driver, slab, GENERATION), threading.Event()
    device.stream = driver.stream_create()
    view = SlabReader(device, lambda: mapping, releaser).open(descriptor(tensor, slab.memory), released.set)
    row, may_read = view[2], []
    del view
    store.die()
    mapping.retire()
    assert torch.equal(row, tensor[2]), "its owner is dead, and it is still to be read"
    gpu.put(device.stream, lambda: bool(may_read), (mapping_address(driver) + OFFSET, tensor.nbytes))
    del row
    gc.collect()
    gpu.advance_all()
    assert not released.wait(0.05), "a kernel reads it"
    assert gpu.num_bytes_held == SLAB_BYTES
    assert driver.num_closes == 0
    may_read.append(True)
    gpu.advance(device.stream)
    assert released.wait(WAIT_S)
    releaser.close()
    assert driver.num_closes == 1
    assert gpu.num_bytes_held == 0
    with pytest.raises(CudaError):
        mapping.acquire(0, 1)


def test_a_slab_without_users_is_unmapped_when_it_is_retired(slab: SlabInfo, driver: FakeDriver) -> None:
    mapping = SlabMapping(driver, slab, GENERATION)
    mapping.retire()
    assert driver.num_closes == 0, "never mapped"
    other = SlabMapping(driver, slab, GENERATION)
    with other.used(0, 8):
        other.retire()
        assert driver.num_closes == 0
    other.retire()
    assert (driver.num_opens, driver.num_closes) == (1, 1)


def test_a_view_that_cannot_be_made_uses_nothing(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, releaser: EventReleaser
) -> None:
    class NoDevice(FakeDevice):
        def wrap(self, memory: DeviceRange) -> torch.Tensor:
            raise RuntimeError("set to fail")

    mapping, released = SlabMapping(driver, slab, GENERATION), threading.Event()
    reader = SlabReader(NoDevice(driver), lambda: mapping, releaser)
    with pytest.raises(RuntimeError, match="set to fail"):
        reader.open(descriptor(torch.zeros(4, 4), slab.memory), released.set)
    mapping.retire()
    assert driver.num_closes == 1
    assert not released.is_set(), "the caller ends the pin"


def test_threads_that_release_and_unmap_choose_their_gpu(gpu: FakeGpu, slab: SlabInfo) -> None:
    driver = FakeDriver(gpu, index=1)
    releaser, mapping = EventReleaser(driver), SlabMapping(driver, slab, GENERATION)
    reader = SlabReader(FakeDevice(driver), lambda: mapping, releaser)
    tensor, released = torch.randn(8, 8), threading.Event()
    put(gpu, slab, tensor)
    held = [reader.open(descriptor(tensor, slab.memory), released.set)]
    mapping.retire()
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    gpu.advance_all()
    assert released.wait(WAIT_S)
    releaser.close()
    assert driver.num_closes == 1
