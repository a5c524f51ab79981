"""The workers' transports on a GPU; `TorchDevice` has all that they need of torch.

pinned_shm  writer: device -> region (registered)      reader: region -> device, on a stream of its own
cuda_ipc    writer: device -> slab                     reader: the slab itself, without a copy
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from triptych_common.protocol.store import Descriptor
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.cuda.release import EventReleaser
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.fence import Place, check_descriptor, check_reservation
from triptych_common.region.mapping import RegionMapping
from triptych_common.region.tensor_view import checked_dtype, tensor_spec
from triptych_common.region.transport import OnRelease
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


class DeviceRange:
    """Bytes on a GPU that torch takes as they are. Lives as long as anything made from it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False),
            "strides": None, "version": 3,
        }  # fmt: skip


class TensorDevice(Protocol):
    """Interface to the GPU as torch sees it."""

    def current_stream(self) -> int:
        """Return the handle of the stream that the caller's kernels go to."""

    def empty(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor: ...

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        """Return `memory` as uint8 [num_bytes], without a copy; it lives as long as the tensor."""


@dataclass(frozen=True)
class TorchDevice:
    """GPU number `index` of this process."""

    index: int = 0

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        return torch.as_tensor(memory, device=f"cuda:{self.index}")


class RegisteredRegion:
    """The region, registered with CUDA once for the process."""

    def __init__(self, driver: CudaDriver, mapping: RegionMapping) -> None:
        """Register the region. Raises CudaError: too much memory to lock, or a limit is in the way."""
        self.mapping = mapping
        self._driver = driver
        driver.host_register(mapping.address, mapping.num_bytes)
        self._is_registered = True

    def close(self) -> None:
        """Unregister the region, which stays mapped. May be called twice."""
        if self._is_registered:
            self._is_registered = False
            self._driver.host_unregister(self.mapping.address)


class PinnedWriter:
    """Writer that copies once from the device into the region."""

    def __init__(self, driver: CudaDriver, device: TensorDevice, region: RegisteredRegion) -> None:
        self._driver = driver
        self._device = device
        self._region = region

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        source = tensor.contiguous()
        num_bytes = tensor_spec(source).num_bytes
        self._region.mapping.view(place.offset, num_bytes)  # inside?
        check_reservation(self._region.mapping, place, num_bytes)
        target = self._region.mapping.address + place.offset
        copy_and_wait(self._driver, self._device, target, source.data_ptr(), num_bytes)

    def close(self) -> None:
        pass


class PinnedReader:
    """Reader that copies once from the region to the device, beside the engine's kernels."""

    def __init__(
        self, driver: CudaDriver, device: TensorDevice, region: RegisteredRegion, releaser: EventReleaser
    ) -> None:
        self._driver = driver
        self._device = device
        self._region = region
        self._releaser = releaser
        self._stream = driver.stream_create()

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        mapping, spec = self._region.mapping, descriptor.spec
        check_descriptor(mapping, descriptor)
        target = self._device.empty(spec.shape, checked_dtype(spec))
        compute = self._device.current_stream()
        # torch may have taken memory that kernels on the compute stream still use, and what comes there
        # reads the copy: so the copy runs between the two.
        self._order(compute, self._stream)
        source = mapping.address + descriptor.offset
        with _nothing_left_on(self._driver, self._stream):
            self._driver.memcpy_async(target.data_ptr(), source, spec.num_bytes, self._stream)
            self._order(self._stream, compute)
        self._releaser.release_after(self._stream, on_release)
        return target

    def close(self) -> None:
        self._driver.stream_destroy(self._stream)

    def _order(self, before: int, after: int) -> None:
        """Make work on `after` run once the current work on `before` is done."""
        event = self._driver.event_create()
        self._driver.event_record(event, before)
        self._driver.stream_wait_event(after, event)
        self._driver.event_destroy(event)


class SlabWriter:
    """Writer that copies once on the device, into the reservation."""

    def __init__(
        self, driver: CudaDriver, device: TensorDevice, current_slab: Callable[[], SlabMapping]
    ) -> None:
        """Store the source of the current slab, which changes when the store restarts."""
        self._driver = driver
        self._device = device
        self._current_slab = current_slab

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        source = tensor.contiguous()
        num_bytes = tensor_spec(source).num_bytes
        slab = self._current_slab()
        slab.check_place(place)
        with slab.used(place.offset, num_bytes) as target:
            copy_and_wait(self._driver, self._device, target, source.data_ptr(), num_bytes)

    def close(self) -> None:
        pass


class SlabReader:
    """Reader that returns the slab's own memory; the pin ends when the kernels that use it have run.

    The mapping counts as used until then: one of a store that is gone is unmapped behind the last of them.
    """

    def __init__(
        self, device: TensorDevice, current_slab: Callable[[], SlabMapping], releaser: EventReleaser
    ) -> None:
        self._device = device
        self._current_slab = current_slab
        self._releaser = releaser

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        slab, spec = self._current_slab(), descriptor.spec
        slab.check(descriptor)
        dtype = checked_dtype(spec)
        memory = DeviceRange(slab.acquire(descriptor.offset, spec.num_bytes), spec.num_bytes)
        try:
            tensor = self._device.wrap(memory).view(dtype).view(spec.shape)
            stream = self._device.current_stream()
        except BaseException:
            slab.release()  # a caller that gets no tensor is not called back
            raise

        def done() -> None:
            """Release pin and mapping in the releaser's thread, after the GPU has read the memory."""
            on_release()
            slab.release()

        # The stream of the reads is that of now: a finalizer may run in any thread, whose own is another.
        # On the range, not on the tensor: slices outlive the tensor they were taken from.
        release = functools.partial(self._releaser.release_after, stream, done)
        weakref.finalize(memory, release).atexit = False
        return tensor

    def close(self) -> None:
        pass


def copy_and_wait(driver: CudaDriver, device: TensorDevice, target: int, source: int, num_bytes: int) -> None:
    """Copy in the order of the stream that made `source`, and wait until every process sees the bytes."""
    stream = device.current_stream()
    with _nothing_left_on(driver, stream):
        driver.memcpy_async(target, source, num_bytes, stream)
        event = driver.event_create()
        try:
            driver.event_record(event, stream)
            driver.event_synchronize(event)
        finally:
            driver.event_destroy(event)


@contextmanager
def _nothing_left_on(driver: CudaDriver, stream: int) -> Iterator[None]:
    """Wait for the stream if a call fails: the caller may free memory that a copy still uses."""
    try:
        yield
    except BaseException:
        try:
            driver.stream_synchronize(stream)
        except CudaError as error:  # CUDA itself has failed: nothing runs any more
            log.warning("cuda copy not waited for", error=str(error))
        raise


__all__ = [
    "DeviceRange",
    "PinnedReader",
    "PinnedWriter",
    "RegisteredRegion",
    "SlabReader",
    "SlabWriter",
    "TensorDevice",
    "TorchDevice",
    "copy_and_wait",
]
