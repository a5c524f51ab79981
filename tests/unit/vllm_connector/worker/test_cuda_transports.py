"""A worker's ends on a fake GPU: what is made once, what is used instead, what a restarted store changes."""

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.cuda.fake_cuda import UUID, FakeDevice, FakeDriver, FakeGpu
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import Descriptor, Welcome
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.slab import DeviceSlab
from triptych_common.region.cuda.transports import PinnedReader, PinnedWriter, SlabReader
from triptych_common.region.fence import StaleDescriptorError, StaleReservationError
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import SharedMemoryWriter
from triptych_vllm_connector.worker.cuda_transports import CopyingReader, GpuTransports

REGION_BYTES = 1 << 16
HASH = "ab" * 32


class Machine:
    """A worker, and its store."""

    def __init__(self, folder: Path, driver: FakeDriver | None) -> None:
        path = folder / "region"
        path.write_bytes(bytes(REGION_BYTES))
        self.gpu = FakeGpu(runs_by_itself=True)
        self.driver = driver
        self.store: FakeDriver | None = None
        self.region = RegionMapping.open(path, REGION_BYTES, populate=False)
        self.welcome = Welcome(
            seq=1, store="s", generation=1, region_path=str(path), region_num_bytes=REGION_BYTES,
            block_num_bytes=4096,
        )  # fmt: skip
        device = FakeDevice(driver or FakeDriver(self.gpu))
        self.ends = GpuTransports(driver, device, "cpu", lambda: self.region, lambda: self.welcome)

    def start_store(self, generation: int) -> DeviceSlab:
        """The one before, if any, is killed."""
        self.kill_store()
        self.store = FakeDriver(self.gpu)
        slab = DeviceSlab(self.store, REGION_BYTES)
        self.welcome = self.welcome.model_copy(update={"generation": generation, "slab": slab.info})
        return slab

    def kill_store(self) -> None:
        if self.store is not None:
            self.store.die()
            self.store = None


@dataclass(frozen=True)
class Order:
    generation: int
    mm_hash: str = HASH
    offset: int = 4096


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    gpu = FakeGpu(runs_by_itself=True)
    machine = Machine(tmp_path, FakeDriver(gpu))
    machine.gpu = gpu
    yield machine
    gpu.assert_no_breach()


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
    """The caller ends it: it must not end twice."""
    released: list[bool] = []
    with pytest.raises((RuntimeError, NotImplementedError)):
        CopyingReader(machine.region, "no-such-device").open(descriptor("shm"), lambda: released.append(True))
    gc.collect()
    assert released == []
    machine.ends.close()


def test_a_store_without_a_slab_reports_it(machine: Machine) -> None:
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


def test_restarts_of_the_store_keep_no_memory_of_the_dead(machine: Machine) -> None:
    reader = machine.ends.slab_reader()
    held: list[torch.Tensor] = []
    for generation in range(1, 5):
        machine.start_store(generation)
        released = threading.Event()
        held[:] = [reader.open(descriptor(f"cuda:{UUID}", generation), released.set)]
        held.clear()
        gc.collect()
        assert released.wait(5.0)
    machine.ends.close()  # waits for what is under way
    machine.kill_store()
    assert machine.gpu.num_bytes_held == 0


def test_an_order_of_the_store_before_is_not_written(machine: Machine) -> None:
    assert machine.driver is not None
    machine.start_store(1)
    writer = machine.ends.slab_writer()
    ones = FakeDevice(machine.driver).own(torch.ones(4, 4))
    writer.write(Order(1), ones)
    machine.start_store(2)
    with pytest.raises(StaleReservationError):
        writer.write(Order(1), ones)
    view = machine.ends.slab_reader().open(descriptor(f"cuda:{UUID}", 2), lambda: None)
    assert not view.any(), "another item may lie there"
    writer.write(Order(2), ones)
    assert view.all()
    machine.ends.close()


class TestProbe:
    """Nothing is announced that was not done once: mapped, and read at both ends."""

    def test_a_slab_that_can_be_read(self, machine: Machine) -> None:
        machine.start_store(1)
        machine.ends.probe_slab()
        machine.ends.probe_slab()
        assert machine.driver is not None
        assert machine.driver.num_opens == 1
        machine.ends.close()
        assert machine.driver.num_closes == 1

    @pytest.mark.parametrize("call", ["ipc_open", "memcpy_async", "event_create", "event_synchronize"])
    def test_what_cuda_refuses_is_an_error_and_tried_again(self, machine: Machine, call: str) -> None:
        machine.start_store(1)
        assert machine.driver is not None
        machine.driver.fail = call
        with pytest.raises(CudaError, match=call):
            machine.ends.probe_slab()
        machine.driver.fail = None
        machine.ends.probe_slab()
        machine.ends.close()

    def test_another_gpu(self, machine: Machine) -> None:
        slab = machine.start_store(1)
        memory = f"cuda:{UUID[:-1]}b"
        elsewhere = slab.info.model_copy(update={"memory": memory})
        machine.welcome = machine.welcome.model_copy(update={"slab": elsewhere})
        with pytest.raises(CudaError, match=memory):
            machine.ends.probe_slab()
        assert machine.driver is not None
        assert machine.driver.num_opens == 0
        machine.ends.close()

    def test_a_store_that_comes_back_without_device_memory(self, machine: Machine) -> None:
        machine.start_store(1)
        machine.ends.probe_slab()
        machine.kill_store()
        machine.welcome = machine.welcome.model_copy(update={"generation": 2, "slab": None})
        with pytest.raises(StoreUnavailableError, match="no device memory"):
            machine.ends.probe_slab()
        assert machine.gpu.num_bytes_held == 0, "the dead store's is unmapped, without an order"
        machine.ends.close()
