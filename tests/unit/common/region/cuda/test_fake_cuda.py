"""The stand-in for CUDA itself: each rule that it keeps."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.cuda.cuda_samples import (
    SLAB_BYTES,
    mapping_address,
)
from tests.support.cuda.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import SlabInfo
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.transports import (
    DeviceRange,
)


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
