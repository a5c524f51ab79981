"""The GPU's transports on a fake GPU that keeps its streams' order: what is copied when, what ends when."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import Descriptor, SlabInfo
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import DeviceSlab, SlabMapping
from triptych_common.region.cuda.transports import (
    DeviceRange,
    PinnedReader,
    PinnedWriter,
    RegisteredRegion,
    SlabReader,
    SlabWriter,
)
from triptych_common.region.fence import StaleDescriptorError, StaleReservationError
from triptych_common.region.tensor_view import address_range, tensor_spec

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


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu()
    yield gpu
    gpu.assert_no_breach()


@pytest.fixture
def store(gpu: FakeGpu) -> FakeDriver:
    """Of the store's process."""
    return FakeDriver(gpu)


@pytest.fixture
def slab(store: FakeDriver) -> SlabInfo:
    return DeviceSlab(store, SLAB_BYTES).info


@pytest.fixture
def region(tmp_path: Path) -> RegionMapping:
    path = tmp_path / "region"
    path.write_bytes(bytes(SLAB_BYTES))
    return RegionMapping.open(path, SLAB_BYTES, populate=False)


@pytest.fixture
def driver(gpu: FakeGpu) -> FakeDriver:
    return FakeDriver(gpu)


@pytest.fixture
def device(driver: FakeDriver) -> FakeDevice:
    return FakeDevice(driver)


@pytest.fixture
def releaser(gpu: FakeGpu, driver: FakeDriver) -> Iterator[EventReleaser]:
    releaser = EventReleaser(driver)
    yield releaser
    gc.collect()
    gpu.advance_all()
    releaser.close()


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


def test_a_slice_holds_what_its_view_held(
    gpu: FakeGpu, slab: SlabInfo, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    tensor = torch.randn(8, 8)
    put(gpu, slab, tensor)
    mapping, released = SlabMapping(driver, slab, GENERATION), threading.Event()
    view = SlabReader(device, lambda: mapping, releaser).open(descriptor(tensor, slab.memory), released.set)
    row = view[2]
    del view
    gc.collect()
    gpu.advance_all()
    assert not released.wait(0.05)
    assert torch.equal(row, tensor[2])
    del row
    gpu.advance_all()
    assert released.wait(WAIT_S)


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


def mapping_address(driver: FakeDriver) -> int:
    (address,) = [each for each, num_bytes in driver.known.items() if num_bytes == SLAB_BYTES]
    return address


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
            raise RuntimeError("told to fail")

    mapping, released = SlabMapping(driver, slab, GENERATION), threading.Event()
    reader = SlabReader(NoDevice(driver), lambda: mapping, releaser)
    with pytest.raises(RuntimeError, match="told"):
        reader.open(descriptor(torch.zeros(4, 4), slab.memory), released.set)
    mapping.retire()
    assert driver.num_closes == 1
    assert not released.is_set(), "who asked ends the pin"


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


# ---- the stand-in itself: each rule that it keeps --------------------------------------------------
class TestRules:
    """What the code must not do is seen, whatever else would happen on a real GPU."""

    @pytest.fixture
    def gpu(self) -> FakeGpu:
        return FakeGpu()

    @pytest.fixture
    def handle(self, slab: SlabInfo) -> bytes:
        return bytes.fromhex(slab.ipc_handle)

    def test_a_handle_is_opened_once_per_process(
        self, gpu: FakeGpu, driver: FakeDriver, handle: bytes
    ) -> None:
        driver.ipc_open(handle)
        with pytest.raises(CudaError, match="has open"):
            driver.ipc_open(handle)
        assert FakeDriver(gpu).ipc_open(handle), "another process"
        assert len(gpu.breaches) == 1

    def test_not_by_its_owner(self, store: FakeDriver, handle: bytes) -> None:
        with pytest.raises(CudaError, match="owns"):
            store.ipc_open(handle)

    def test_memory_of_the_dead_stays_mapped_and_is_opened_no_more(
        self, gpu: FakeGpu, store: FakeDriver, driver: FakeDriver, handle: bytes
    ) -> None:
        address = driver.ipc_open(handle)
        store.die()
        with pytest.raises(CudaError, match="invalid resource handle"):
            FakeDriver(gpu).ipc_open(handle)
        assert gpu.num_bytes_held == SLAB_BYTES
        driver.ipc_close(address)
        assert gpu.num_bytes_held == 0
        assert not gpu.breaches

    def test_nothing_is_freed_that_another_has_mapped(
        self, store: FakeDriver, driver: FakeDriver, handle: bytes
    ) -> None:
        driver.ipc_open(handle)
        with pytest.raises(CudaError, match="another process"):
            store.free(mapping_address(store))

    def test_nothing_is_closed_twice_or_used_after_it(
        self, gpu: FakeGpu, driver: FakeDriver, device: FakeDevice, handle: bytes
    ) -> None:
        address, target = driver.ipc_open(handle), device.own(torch.zeros(4))
        driver.ipc_close(address)
        with pytest.raises(CudaError, match="closed before"):
            driver.ipc_close(address)
        with pytest.raises(CudaError, match="not CUDA's"):
            driver.memcpy_async(target.data_ptr(), address, 4, 0)
        assert len(gpu.breaches) == 2

    def test_nothing_is_closed_that_a_stream_or_a_view_has_yet_to_use(
        self, gpu: FakeGpu, driver: FakeDriver, device: FakeDevice, handle: bytes
    ) -> None:
        address, target = driver.ipc_open(handle), device.own(torch.zeros(4))
        driver.memcpy_async(target.data_ptr(), address, 4, 0)
        with pytest.raises(CudaError, match="a stream"):
            driver.ipc_close(address)
        gpu.advance_all()
        view = device.wrap(DeviceRange(address, 4))
        with pytest.raises(CudaError, match="a view"):
            driver.ipc_close(address)
        del view
        gc.collect()
        driver.ipc_close(address)

    def test_a_thread_is_on_the_first_gpu_until_it_chooses(self, gpu: FakeGpu, handle: bytes) -> None:
        driver = FakeDriver(gpu, index=1)
        with ThreadPoolExecutor(1) as pool:
            with pytest.raises(CudaError, match="another GPU"):
                pool.submit(driver.ipc_open, handle).result()
            pool.submit(driver.bind_thread).result()
            assert pool.submit(driver.ipc_open, handle).result()

    def test_another_gpu_does_not_know_the_handle(self, handle: bytes) -> None:
        with pytest.raises(CudaError, match="invalid resource handle"):
            FakeDriver(FakeGpu(uuid=f"{UUID[:-1]}b")).ipc_open(handle)


# ---- pinned_shm ----------------------------------------------------------------------------------
def test_the_copy_to_the_device_is_ordered_and_not_waited_for(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    tensor = torch.randn(8, 8)
    region.view(OFFSET, tensor.nbytes)[:] = tensor.numpy().tobytes()
    device.stream = compute = driver.stream_create()
    may_go: list[bool] = []
    gpu.put(compute, lambda: bool(may_go))  # a kernel that still uses the memory torch hands out
    released, seen = threading.Event(), []
    reader = PinnedReader(driver, device, RegisteredRegion(driver, region), releaser)

    target = reader.open(descriptor(tensor, "shm"), released.set)

    gpu.put(compute, lambda: not seen.append(target.clone()))  # a kernel of the engine reads it
    for stream in sorted(gpu.streams, reverse=True):
        gpu.advance(stream)
    assert not target.any(), "the copy waits for the kernel before it"
    assert not released.wait(0.05), "the region is still to be read"
    may_go.append(True)
    gpu.advance_all()
    assert torch.equal(seen[0], tensor), "the kernel behind it waits for the copy"
    assert released.wait(WAIT_S)


def fail_after_the_copy(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = driver.memcpy_async

    def copy_and_fail(target: int, source: int, num_bytes: int, stream: int) -> None:
        copy(target, source, num_bytes, stream)
        driver.fail = "event_create"

    monkeypatch.setattr(driver, "memcpy_async", copy_and_fail)


def test_a_copy_whose_call_failed_is_over_before_the_region_is_given_back(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    registered = RegisteredRegion(driver, region)
    reader = PinnedReader(driver, device, registered, releaser)
    tensor, released = torch.randn(8, 8), threading.Event()
    region.view(OFFSET, tensor.nbytes)[:] = tensor.numpy().tobytes()
    fail_after_the_copy(driver, monkeypatch)
    with pytest.raises(CudaError, match="event_create"):
        reader.open(descriptor(tensor, "shm"), released.set)
    assert not gpu.is_to_be_used(region.address, region.num_bytes)
    assert not released.is_set(), "who got no tensor ends the pin"


def test_a_copy_whose_call_failed_is_over_before_its_blocks_are_given_back(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    writer = PinnedWriter(driver, device, RegisteredRegion(driver, region))
    tensor = device.own(torch.randn(8, 8))
    fail_after_the_copy(driver, monkeypatch)
    with pytest.raises(CudaError, match="event_create"):
        writer.write(Order(), tensor)
    assert not gpu.is_to_be_used(region.address, region.num_bytes)


def test_the_region_is_registered_once_and_given_back(region: RegionMapping, driver: FakeDriver) -> None:
    registered = RegisteredRegion(driver, region)
    assert driver.registered == [region.address]
    registered.close()
    registered.close()
    assert driver.registered == []


def test_a_write_into_the_region_is_there_when_it_returns(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice
) -> None:
    tensor = torch.randn(8, 8).t()
    writer = PinnedWriter(driver, device, RegisteredRegion(driver, region))
    contiguous = device.own(tensor.contiguous())
    written(gpu, lambda: writer.write(Order(), contiguous))
    assert region.view(OFFSET, tensor.nbytes) == contiguous.numpy().tobytes()


# ---- the rest ------------------------------------------------------------------------------------
def test_when_cuda_has_failed_pins_end_all_the_same(driver: FakeDriver, releaser: EventReleaser) -> None:
    driver.fail = "event_create"
    released = threading.Event()
    releaser.release_after(0, released.set)
    assert released.wait(WAIT_S)


def test_a_release_that_fails_does_not_end_the_others(driver: FakeDriver, releaser: EventReleaser) -> None:
    def fail() -> None:
        raise RuntimeError("told to fail")

    released = threading.Event()
    driver.fail = "event_create"
    releaser.release_after(0, fail)
    releaser.release_after(0, released.set)
    assert released.wait(WAIT_S)


def test_without_the_bindings_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.delitem(sys.modules, "triptych_common.region.cuda.runtime", raising=False)
    with pytest.raises(CudaError, match=r"triptych-common\[cuda\]"):
        load_driver()


def test_an_event_that_cannot_be_recorded_is_destroyed(driver: FakeDriver, releaser: EventReleaser) -> None:
    driver.fail = "event_record"
    released = threading.Event()
    thread = threading.Thread(target=releaser.release_after, args=(0, released.set))
    thread.start()  # one that has never used the GPU
    thread.join()
    assert released.wait(WAIT_S)
    assert thread.ident in driver.bound_threads
    assert driver.num_destroyed == 1
