"""Tensors from process to process through the GPU: right bytes, no needless copy, no early release."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cuda.gpu import why_no_gpu

if (reason := why_no_gpu()) is not None:
    pytest.skip(reason, allow_module_level=True)

import torch

from tests.support.cuda.gpu_producer import SLEEP_CYCLES, Order, pattern
from tests.support.stores import PushLog, StoreProcess
from triptych_common.protocol.store import EntrySealed, Pinned, PinOrWatch, Unpin
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaDriver
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.cuda.transports import (
    PinnedReader,
    RegisteredRegion,
    SlabReader,
    SlabWriter,
    TorchDevice,
)
from triptych_common.region.fence import StaleDescriptorError, StaleReservationError
from triptych_common.region.tensor_view import address_range
from triptych_common.region.transport import TensorReader
from triptych_common.store_session import StoreSession
from triptych_vllm_connector.worker.cuda_transports import GpuTransports

ROOT = Path(__file__).resolve().parents[2]
SLAB_BYTES = 256 << 20
ROWS, WIDTH = 2048, 4096
HASH = "ab" * 32
WAIT_S = 20.0


class ConsumerProcess:
    """This process as a consumer: a session, and its ends of both transports."""

    def __init__(self, daemon: StoreProcess, driver: CudaDriver) -> None:
        self.daemon = daemon
        self.pushes = PushLog()
        self.session: StoreSession = daemon.connect("pd-0/worker-0", on_push=self.pushes)
        welcome = self.session.welcome
        assert welcome.slab is not None, daemon.log()
        self.slab = SlabMapping(driver, welcome.slab, welcome.generation)
        self.region = RegionMapping.open(welcome.region_path, welcome.region_num_bytes)
        self.registered = RegisteredRegion(driver, self.region)
        self.releaser = EventReleaser(driver)
        device = TorchDevice()
        self.slab_reader: TensorReader = SlabReader(device, lambda: self.slab, self.releaser)
        self.region_reader: TensorReader = PinnedReader(driver, device, self.registered, self.releaser)

    def receive(self, memory: str, dtype: torch.dtype, rows: int = ROWS) -> EntrySealed:
        """Have another process write the pattern, and get the push of the seal."""
        self.session.request(PinOrWatch(seq=0, mm_hash=HASH))
        script = ROOT / "tests" / "support" / "cuda" / "gpu_producer.py"
        name = str(dtype).removeprefix("torch.")
        result = subprocess.run(
            [sys.executable, str(script), str(self.daemon.socket), memory, HASH, str(rows), str(WIDTH), name],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        sealed = self.pushes.wait_next(WAIT_S)
        assert isinstance(sealed, EntrySealed)
        assert sealed.descriptor.memory == memory
        return sealed

    def unpin(self, sealed: EntrySealed) -> Callable[[], None]:
        return lambda: void(self.session.submit(Unpin(seq=0, pin_id=sealed.pin_id)))

    def wait_unpinned(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.daemon.stats().num_pins:
            assert time.monotonic() < deadline, "the pin did not end"
            threading.Event().wait(0.02)

    def close(self) -> None:
        """Views are gone by now, or go with the process."""
        self.slab.retire()
        self.releaser.close()
        self.registered.close()


def void(result: object) -> None:
    """A callback returns nothing."""


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[StoreProcess]:
    daemon = StoreProcess(run_dir, f"--slab-bytes={SLAB_BYTES}", region_bytes=128 << 20)
    daemon.start()
    yield daemon
    daemon.close()


@pytest.fixture(scope="module")
def driver() -> CudaDriver:
    return load_driver()


@pytest.fixture
def consumer(daemon: StoreProcess, driver: CudaDriver) -> Iterator[ConsumerProcess]:
    consumer = ConsumerProcess(daemon, driver)
    yield consumer
    gc.collect()
    torch.cuda.synchronize()
    consumer.close()


def slab_memory(consumer: ConsumerProcess) -> str:
    return consumer.slab.info.memory


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_ipc_bytes_are_right_and_lie_in_the_slab(consumer: ConsumerProcess, dtype: torch.dtype) -> None:
    sealed = consumer.receive(slab_memory(consumer), dtype)
    before = torch.cuda.memory_allocated()

    view = consumer.slab_reader.open(sealed.descriptor, consumer.unpin(sealed))

    assert torch.cuda.memory_allocated() == before, "no memory was taken, so nothing was copied"
    first, last = address_range(view)
    assert first == consumer.slab.address + sealed.descriptor.offset
    assert last <= consumer.slab.address + SLAB_BYTES
    assert torch.equal(view, pattern(ROWS, WIDTH, dtype, "cuda"))
    del view
    consumer.wait_unpinned()


def test_cuda_ipc_the_pin_ends_after_the_kernels_that_read(consumer: ConsumerProcess) -> None:
    sealed = consumer.receive(slab_memory(consumer), torch.float32)
    view = consumer.slab_reader.open(sealed.descriptor, consumer.unpin(sealed))
    expected = pattern(ROWS, WIDTH, torch.float32, "cuda").double().sum()
    torch.cuda.synchronize()

    start = time.monotonic()
    torch.cuda._sleep(4 * SLEEP_CYCLES)
    total = view.double().sum()
    del view
    gc.collect()
    assert time.monotonic() - start < 0.5, "dropping the view does not wait"
    done = torch.cuda.Event()
    done.record()
    while not done.query():
        num_pins = consumer.daemon.stats().num_pins
        assert num_pins == 1 or done.query(), "released while a kernel was to read it"
    consumer.wait_unpinned()
    assert total == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_pinned_shm_copies_what_was_written(consumer: ConsumerProcess, dtype: torch.dtype) -> None:
    sealed = consumer.receive("shm", dtype)
    tensor = consumer.region_reader.open(sealed.descriptor, consumer.unpin(sealed))
    assert tensor.is_cuda
    assert torch.equal(tensor, pattern(ROWS, WIDTH, dtype, "cuda"))
    consumer.wait_unpinned()


def test_pinned_shm_is_not_waited_for_and_stays_in_order(consumer: ConsumerProcess) -> None:
    sealed = consumer.receive("shm", torch.float32)
    expected = pattern(ROWS, WIDTH, torch.float32, "cuda")
    warm = expected.clone()  # the kernels are loaded, and torch has memory for the copy
    assert bool((warm == expected).all())
    del warm
    torch.cuda.synchronize()

    start = time.monotonic()
    torch.cuda._sleep(4 * SLEEP_CYCLES)
    tensor = consumer.region_reader.open(sealed.descriptor, consumer.unpin(sealed))
    same = (tensor == expected).all()
    elapsed = time.monotonic() - start
    assert not torch.cuda.current_stream().query(), "the kernel before it still runs"
    assert elapsed < 0.5, "and no thread waited for it"
    assert consumer.daemon.stats().num_pins == 1, "the region is still to be read"
    assert bool(same)
    consumer.wait_unpinned()


def test_what_is_in_use_outlives_its_store_and_counts_no_more(
    consumer: ConsumerProcess, daemon: StoreProcess, driver: CudaDriver
) -> None:
    sealed = consumer.receive(slab_memory(consumer), torch.float32)
    view = consumer.slab_reader.open(sealed.descriptor, lambda: None)
    daemon.stop(signal.SIGKILL)
    assert torch.equal(view, pattern(ROWS, WIDTH, torch.float32, "cuda"))
    daemon.start()
    later = daemon.connect("pd-1/worker-0")
    assert not isinstance(later.request(PinOrWatch(seq=0, mm_hash=HASH)), Pinned)
    welcome = later.welcome
    assert welcome.slab is not None
    earlier, consumer.slab = consumer.slab, SlabMapping(driver, welcome.slab, welcome.generation)
    with pytest.raises(StaleDescriptorError):
        consumer.slab_reader.open(sealed.descriptor, lambda: None)
    earlier.retire()
    assert earlier.is_mapped, "a view of it lives"
    assert torch.equal(view, pattern(ROWS, WIDTH, torch.float32, "cuda"))


def test_what_outlives_its_store_is_given_back_with_the_last_view(
    consumer: ConsumerProcess, daemon: StoreProcess, driver: CudaDriver
) -> None:
    """Each restart would else keep a slab's worth of memory."""
    sealed = consumer.receive(slab_memory(consumer), torch.float32)
    released = threading.Event()
    view = consumer.slab_reader.open(sealed.descriptor, released.set)
    daemon.stop(signal.SIGKILL)
    torch.cuda.synchronize()
    free_before, _ = torch.cuda.mem_get_info()
    consumer.slab.retire()
    del view
    gc.collect()
    assert released.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while torch.cuda.mem_get_info()[0] < free_before + SLAB_BYTES // 2:
        assert time.monotonic() < deadline, "the dead store's memory is still held"
        threading.Event().wait(0.02)


def test_an_order_of_an_earlier_store_is_not_written(
    consumer: ConsumerProcess, daemon: StoreProcess, driver: CudaDriver
) -> None:
    sealed = consumer.receive(slab_memory(consumer), torch.float32)
    writer = SlabWriter(driver, TorchDevice(), lambda: consumer.slab)
    stale = Order(HASH, sealed.descriptor.generation - 1, sealed.descriptor.offset)
    with pytest.raises(StaleReservationError):
        writer.write(stale, torch.zeros(ROWS, WIDTH, device="cuda"))
    view = consumer.slab_reader.open(sealed.descriptor, consumer.unpin(sealed))
    assert torch.equal(view, pattern(ROWS, WIDTH, torch.float32, "cuda"))
    del view
    consumer.wait_unpinned()


def test_the_slab_is_tried_before_it_is_announced(consumer: ConsumerProcess, driver: CudaDriver) -> None:
    consumer.slab.retire()  # CUDA opens a handle once in a process
    ends = GpuTransports(
        driver, TorchDevice(), "cuda", lambda: consumer.region, lambda: consumer.session.welcome
    )
    assert f"cuda:{ends.device_uuid()}" == slab_memory(consumer)
    ends.probe_slab()
    ends.probe_slab()
    ends.close()
