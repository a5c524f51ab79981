"""The stand-in for CUDA itself: each rule that it keeps."""

import gc

import pytest
import torch

from tests.support.cuda.cuda_samples import mapping_address
from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.protocol.store import SlabInfo
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.transports import DeviceRange


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

    def test_nothing_is_freed_that_another_has_mapped(
        self, store: FakeDriver, driver: FakeDriver, handle: bytes
    ) -> None:
        driver.ipc_open(handle)
        with pytest.raises(CudaError, match="another process"):
            store.free(mapping_address(store))

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
