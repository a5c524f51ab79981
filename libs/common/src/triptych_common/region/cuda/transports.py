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
from triptych_common.region.transport import OnRelease, OnWritten, StartedCopy
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

MAX_PIECE_BYTES = 64 << 30
"""Bytes that are registered with CUDA at once where a region is registered in pieces."""
SINGLE_PIECE_FACTOR = 8
"""A region of fewer bytes than this many pieces is registered as a whole."""


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

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        """Allocate memory for work on `stream`, None for the current one, without waiting for either.

        Memory of another stream may be read by the current stream too: it is used again only after what the
        current stream has been given when the tensor goes.
        """

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        """Return `memory` as uint8 [num_bytes], without a copy; it lives as long as the tensor."""


@dataclass(frozen=True)
class TorchDevice:
    """GPU number `index` of this process."""

    index: int = 0

    def current_stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def empty(self, shape: tuple[int, int], dtype: torch.dtype, stream: int | None = None) -> torch.Tensor:
        if stream is None:
            return torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")
        current = torch.cuda.current_stream(self.index)
        # torch's allocator keeps a pool for each stream: what it hands out here, no kernel of the current
        # stream has in use any more, so the copy need not wait for those kernels.
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self.index)):
            tensor = torch.empty(shape, dtype=dtype, device=f"cuda:{self.index}")
        tensor.record_stream(current)
        return tensor

    def wrap(self, memory: DeviceRange) -> torch.Tensor:
        return torch.as_tensor(memory, device=f"cuda:{self.index}")


class RegisteredRegion:
    def __init__(
        self, driver: CudaDriver, mapping: RegionMapping, max_piece_bytes: int = MAX_PIECE_BYTES
    ) -> None:
        """Register the region. Raises CudaError: too much memory to lock, or a limit is in the way."""
        self.mapping = mapping
        self._driver = driver
        self._pieces: list[tuple[int, int]] = []  # offset and bytes of each registration
        num_bytes = mapping.num_bytes
        piece_bytes = num_bytes if num_bytes < SINGLE_PIECE_FACTOR * max_piece_bytes else max_piece_bytes
        try:
            for offset in range(0, num_bytes, piece_bytes):
                piece = min(piece_bytes, num_bytes - offset)
                driver.host_register(mapping.address + offset, piece)
                self._pieces.append((offset, piece))
        except CudaError:
            self.close()
            raise

    def copies(self, offset: int, num_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (address, bytes from `offset`, bytes) of the copies that the range takes.

        CUDA refuses a copy that touches two registrations.
        """
        end = offset + num_bytes
        for start, piece in self._pieces:
            first, last = max(offset, start), min(end, start + piece)
            if first < last:
                yield self.mapping.address + first, first - offset, last - first

    def close(self) -> None:
        """Unregister the region, which stays mapped. May be called twice."""
        while self._pieces:
            self._driver.host_unregister(self.mapping.address + self._pieces.pop()[0])


class _Writer:
    """Base class of both writers: copies on the stream that made the tensor, and waits for it in `write`."""

    def __init__(self, driver: CudaDriver, device: TensorDevice) -> None:
        self._driver = driver
        self._device = device

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        """Copy `tensor` to `place`, and wait until every process sees the bytes."""
        on_written = self.queue(place, tensor)
        try:
            wait_for_current(self._driver, self._device)
        finally:
            on_written()

    def queue(self, place: Place, tensor: torch.Tensor) -> OnWritten:
        """Queue the copy; see `QueuingWriter.queue`."""
        raise NotImplementedError

    def close(self) -> None:
        pass


class PinnedWriter(_Writer):
    """Writer that copies once from the device into the region."""

    def __init__(self, driver: CudaDriver, device: TensorDevice, region: RegisteredRegion) -> None:
        super().__init__(driver, device)
        self._region = region

    def queue(self, place: Place, tensor: torch.Tensor) -> OnWritten:
        source = tensor.contiguous()
        num_bytes = tensor_spec(source).num_bytes
        self._region.mapping.view(place.offset, num_bytes)  # inside?
        check_reservation(self._region.mapping, place, num_bytes)
        stream = self._device.current_stream()
        with _nothing_left_on(self._driver, stream):
            for target, start, length in self._region.copies(place.offset, num_bytes):
                self._driver.memcpy_async(target, source.data_ptr() + start, length, stream)
        return _nothing


class PinnedReader:
    """Reader that copies once from the region to the device, beside the engine's kernels.

    The copy waits for no kernel: its target comes from the pool of the copies' own stream. What the engine
    launches afterwards waits for the copy.
    """

    def __init__(
        self, driver: CudaDriver, device: TensorDevice, region: RegisteredRegion, releaser: EventReleaser
    ) -> None:
        self._driver = driver
        self._device = device
        self._region = region
        self._releaser = releaser
        self._stream = driver.stream_create()

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        return self.finish(self.start(descriptor), on_release)

    def start(self, descriptor: Descriptor) -> StartedCopy:
        """Queue the copy of a pinned tensor before a step needs it; see `StartingReader.start`."""
        mapping, spec = self._region.mapping, descriptor.spec
        check_descriptor(mapping, descriptor)
        self._region.mapping.view(descriptor.offset, spec.num_bytes)  # inside?
        target = self._device.empty(spec.shape, checked_dtype(spec), self._stream)
        with _nothing_left_on(self._driver, self._stream):
            for source, start, length in self._region.copies(descriptor.offset, spec.num_bytes):
                self._driver.memcpy_async(target.data_ptr() + start, source, length, self._stream)
        return StartedCopy(target)

    def finish(self, started: StartedCopy, on_release: OnRelease) -> torch.Tensor:
        """Return the tensor, for which later kernels wait; see `StartingReader.finish`."""
        with _nothing_left_on(self._driver, self._stream):
            self._order(self._stream, self._device.current_stream())
        self._releaser.release_after(self._stream, on_release)
        return started.tensor

    def close(self) -> None:
        self._driver.stream_destroy(self._stream)

    def _order(self, before: int, after: int) -> None:
        """Make work on `after` run once the current work on `before` is done."""
        event = self._driver.event_create()
        self._driver.event_record(event, before)
        self._driver.stream_wait_event(after, event)
        self._driver.event_destroy(event)


class SlabWriter(_Writer):
    """Writer that copies once on the device, into the reservation."""

    def __init__(
        self, driver: CudaDriver, device: TensorDevice, current_slab: Callable[[], SlabMapping]
    ) -> None:
        """Store the source of the current slab, which changes when the store restarts."""
        super().__init__(driver, device)
        self._current_slab = current_slab

    def queue(self, place: Place, tensor: torch.Tensor) -> OnWritten:
        source = tensor.contiguous()
        num_bytes = tensor_spec(source).num_bytes
        slab = self._current_slab()
        slab.check_place(place)
        target = slab.acquire(place.offset, num_bytes)
        stream = self._device.current_stream()
        try:
            with _nothing_left_on(self._driver, stream):
                self._driver.memcpy_async(target, source.data_ptr(), num_bytes, stream)
        except BaseException:
            slab.release()
            raise
        return slab.release


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


def wait_for_current(driver: CudaDriver, device: TensorDevice) -> None:
    """Wait until the current stream has done its work, and every process sees what it wrote."""
    stream = device.current_stream()
    with _nothing_left_on(driver, stream):
        event = driver.event_create()
        try:
            driver.event_record(event, stream)
            driver.event_synchronize(event)
        finally:
            driver.event_destroy(event)


def _nothing() -> None:
    """Do nothing: the region stays mapped while its writer lives."""


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
