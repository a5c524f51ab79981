"""Transport `pinned_shm` on the fake GPU; events and releases when CUDA fails."""

import sys
import threading

import pytest
import torch

from tests.support.cuda.cuda_samples import OFFSET, WAIT_S, Order, descriptor, written
from tests.support.cuda.fake_cuda import FakeDevice, FakeDriver, FakeGpu
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.loading import load_driver
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.transports import (
    PinnedReader,
    PinnedWriter,
    RegisteredRegion,
)


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
