"""Transport `pinned_shm` on the fake GPU; events and releases when CUDA fails."""

import contextlib
import queue
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.support.cuda.cuda_samples import OFFSET, WAIT_S, Order, descriptor, written
from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.transports import PinnedReader, PinnedWriter, RegisteredRegion, TorchDevice


# ---- pinned_shm ----------------------------------------------------------------------------------
def test_the_copy_to_the_device_waits_for_no_kernel_and_kernels_behind_it_wait_for_it(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    tensor = torch.randn(8, 8)
    region.view(OFFSET, tensor.nbytes)[:] = tensor.numpy().tobytes()
    device.stream = compute = driver.stream_create()
    may_go: list[bool] = []
    gpu.put(compute, lambda: bool(may_go))  # a kernel of the step before, which runs for long
    released, seen = threading.Event(), []
    reader = PinnedReader(driver, device, RegisteredRegion(driver, region), releaser)

    target = reader.open(descriptor(tensor, "shm"), released.set)

    gpu.put(compute, lambda: not seen.append(target.clone()))  # a kernel of this step reads it
    gpu.advance(compute)
    assert not seen, "the kernel behind it waits for the copy"
    for stream in gpu.streams:
        if stream != compute:
            gpu.advance(stream)
    assert torch.equal(target, tensor), "the copies' own stream alone completes the copy"
    assert released.wait(WAIT_S), "the region is read; no kernel of the engine holds it back"
    gpu.advance(compute)
    assert not seen
    may_go.append(True)
    gpu.advance(compute)
    assert torch.equal(seen[0], tensor)


def test_a_region_in_pieces_is_copied_piece_by_piece(
    gpu: FakeGpu, region: RegionMapping, driver: FakeDriver, device: FakeDevice, releaser: EventReleaser
) -> None:
    """CUDA refuses a copy that touches two registrations."""
    registered = RegisteredRegion(driver, region, max_piece_bytes=OFFSET + 4096)
    assert len(driver.registered) > 8
    assert sum(driver.known[each] for each in driver.registered) == region.num_bytes
    tensor = device.own(torch.randn(64, 64))  # 16 KiB from `OFFSET`, over the end of the first piece
    written(gpu, lambda: PinnedWriter(driver, device, registered).write(Order(), tensor))
    assert region.view(OFFSET, tensor.nbytes) == tensor.numpy().tobytes()
    released = threading.Event()
    target = PinnedReader(driver, device, registered, releaser).open(descriptor(tensor, "shm"), released.set)
    gpu.advance_all()
    assert torch.equal(target, tensor)
    assert released.wait(WAIT_S)
    registered.close()
    assert driver.registered == []


def test_a_region_below_512_gib_is_registered_as_a_whole(region: RegionMapping, driver: FakeDriver) -> None:
    piece = region.num_bytes // 8
    whole = RegisteredRegion(driver, region, max_piece_bytes=piece + 1)
    assert driver.registered == [region.address]
    whole.close()
    RegisteredRegion(driver, region, max_piece_bytes=piece)
    assert driver.registered == [region.address + number * piece for number in range(8)]


def test_a_region_of_which_a_piece_cannot_be_registered_is_not_registered_at_all(
    region: RegionMapping, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = driver.host_register

    def register_two(address: int, num_bytes: int) -> None:
        register(address, num_bytes)
        driver.fail = "host_register" if len(driver.registered) == 2 else None

    monkeypatch.setattr(driver, "host_register", register_two)
    with pytest.raises(CudaError):
        RegisteredRegion(driver, region, max_piece_bytes=region.num_bytes // 8)
    assert driver.registered == []


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
    assert not released.is_set(), "a caller that got no tensor ends the pin"


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


def test_torch_is_asked_for_the_copies_own_pool_and_told_who_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator documents this; tests/gpu sees that the bytes stay."""
    current: list[object] = ["compute"]
    calls: list[tuple[str, object]] = []

    class Tensor:
        def record_stream(self, stream: object) -> None:
            calls.append(("record_stream", stream))

    def empty(*_: object, **__: object) -> Tensor:
        calls.append(("empty", current[-1]))
        return Tensor()

    @contextlib.contextmanager
    def on(stream: object) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: current[-1])
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: f"stream {handle} of {device}")
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", empty)
    TorchDevice(1).empty((2, 2), torch.float32, 7)
    assert calls == [("empty", "stream 7 of 1"), ("record_stream", "compute")]


# ---- the rest ------------------------------------------------------------------------------------


def test_a_release_that_fails_does_not_end_the_others(driver: FakeDriver, releaser: EventReleaser) -> None:
    def fail() -> None:
        raise RuntimeError("set to fail")

    released = threading.Event()
    driver.fail = "event_create"
    releaser.release_after(0, fail)
    releaser.release_after(0, released.set)
    assert released.wait(WAIT_S)


def test_without_the_bindings_the_error_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_event_that_cannot_be_recorded_is_replaced_by_the_whole_stream(
    gpu: FakeGpu, driver: FakeDriver, releaser: EventReleaser
) -> None:
    """A copy on the stream may still run: nothing is released or sealed before its end."""
    may_go: list[bool] = []
    gpu.put(0, lambda: bool(may_go))
    driver.fail = "event_record"
    done: queue.SimpleQueue[CudaError | None] = queue.SimpleQueue()
    releaser.call_after(0, done.put)
    with pytest.raises(queue.Empty):
        done.get(timeout=0.05)
    may_go.append(True)
    gpu.advance(0)
    assert done.get(timeout=WAIT_S) is None


def test_a_gpu_that_has_failed_is_reported_to_what_waits_for_it(
    driver: FakeDriver, releaser: EventReleaser
) -> None:
    driver.fail = "event_synchronize"
    done: queue.SimpleQueue[CudaError | None] = queue.SimpleQueue()
    releaser.call_after(0, done.put)
    assert "event_synchronize" in str(done.get(timeout=WAIT_S))
