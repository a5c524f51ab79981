"""A worker's ends on a fake GPU: what is made once, what is used instead, what a restarted store changes."""

import gc
from pathlib import Path

import pytest
import torch
from support.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import Descriptor, Welcome
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.slab import DeviceSlab
from triptych_common.region.cuda.transports import PinnedReader, PinnedWriter, SlabReader
from triptych_common.region.fence import StaleDescriptorError
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import SharedMemoryWriter
from triptych_vllm_connector.gpu_transports import CopyingReader, GpuTransports

REGION_BYTES = 1 << 16
HASH = "ab" * 32


class Machine:
    """A worker, and the store it talks to."""

    def __init__(self, folder: Path, driver: FakeDriver | None) -> None:
        path = folder / "region"
        path.write_bytes(bytes(REGION_BYTES))
        self.gpu = FakeGpu(runs_by_itself=True)
        self.driver = driver
        self.region = RegionMapping.open(path, REGION_BYTES, populate=False)
        self.welcome = Welcome(
            seq=1, store="s", generation=1, region_path=str(path), region_num_bytes=REGION_BYTES,
            block_num_bytes=4096,
        )  # fmt: skip
        device = FakeDevice(driver or FakeDriver(self.gpu))
        self.ends = GpuTransports(driver, device, "cpu", lambda: self.region, lambda: self.welcome)

    def start_store(self, generation: int) -> DeviceSlab:
        slab = DeviceSlab(FakeDriver(self.gpu), REGION_BYTES)
        self.welcome = self.welcome.model_copy(update={"generation": generation, "slab": slab.info})
        return slab


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    gpu = FakeGpu(runs_by_itself=True)
    machine = Machine(tmp_path, FakeDriver(gpu))
    machine.gpu = gpu
    return machine


def descriptor(memory: str, generation: int = 1) -> Descriptor:
    spec = tensor_spec(torch.zeros(4, 4))
    return Descriptor(mm_hash=HASH, spec=spec, offset=4096, generation=generation, memory=memory)


def test_the_region_is_registered_once(machine: Machine) -> None:
    assert isinstance(machine.ends.region_writer(), PinnedWriter)
    assert isinstance(machine.ends.region_reader(), PinnedReader)
    assert machine.driver is not None
    assert machine.driver.registered == [machine.region.address]
    machine.ends.close()
    assert machine.driver.registered == []


def test_a_region_that_cannot_be_registered_is_copied_by_torch(machine: Machine) -> None:
    assert machine.driver is not None
    machine.driver.fail = "host_register"
    assert isinstance(machine.ends.region_writer(), SharedMemoryWriter)
    assert isinstance(machine.ends.region_reader(), CopyingReader)
    machine.ends.close()


def test_without_the_bindings_there_is_no_slab_and_the_region_is_copied(tmp_path: Path) -> None:
    ends = Machine(tmp_path, None).ends
    released: list[bool] = []
    tensor = ends.region_reader().open(descriptor("shm"), lambda: released.append(True))
    gc.collect()
    assert released == [True]
    assert not tensor.any()
    with pytest.raises(CudaError):
        ends.slab_reader()
    with pytest.raises(CudaError):
        ends.slab_writer()


def test_a_copy_that_fails_does_not_end_the_pin(machine: Machine) -> None:
    """Who asked for it does: it must not end twice."""
    released: list[bool] = []
    with pytest.raises((RuntimeError, NotImplementedError)):
        CopyingReader(machine.region, "no-such-device").open(descriptor("shm"), lambda: released.append(True))
    gc.collect()
    assert released == []
    machine.ends.close()


def test_a_store_without_a_slab_says_so(machine: Machine) -> None:
    with pytest.raises(StoreUnavailableError):
        machine.ends.slab_reader().open(descriptor(f"cuda:{UUID}"), lambda: None)
    machine.ends.close()


def test_a_restarted_store_has_another_slab(machine: Machine) -> None:
    reader = machine.ends.slab_reader()
    assert isinstance(reader, SlabReader)
    machine.start_store(1)
    old = reader.open(descriptor(f"cuda:{UUID}", 1), lambda: None)
    assert machine.ends.slab_extent() is not None
    machine.start_store(2)
    with pytest.raises(StaleDescriptorError):
        reader.open(descriptor(f"cuda:{UUID}", 1), lambda: None)
    new = reader.open(descriptor(f"cuda:{UUID}", 2), lambda: None)
    assert new.data_ptr() != old.data_ptr()
    assert not old.any(), "what is in use stays mapped"
    machine.ends.close()
