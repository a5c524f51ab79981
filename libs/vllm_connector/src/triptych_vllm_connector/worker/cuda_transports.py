"""Transports on a worker's GPU: one driver, one registered region, one slab mapping per store."""

from collections.abc import Callable

import torch

from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import Descriptor, Welcome, device_memory
from triptych_common.region import RegionMapping
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.cuda.release import EventReleaser, OnDone
from triptych_common.region.cuda.slab import SlabMapping
from triptych_common.region.cuda.transports import (
    PinnedReader,
    PinnedWriter,
    RegisteredRegion,
    SlabReader,
    SlabWriter,
    TensorDevice,
    wait_for_current,
)
from triptych_common.region.tensor_view import tensor_view
from triptych_common.region.transport import OnRelease, SharedMemoryWriter, TensorReader, TensorWriter
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


class GpuTransports:
    """Creates and closes the GPU's readers and writers, for vLLM's thread."""

    def __init__(
        self,
        driver: CudaDriver | None,
        device: TensorDevice,
        device_type: str,
        region: Callable[[], RegionMapping],
        welcome: Callable[[], Welcome],
    ) -> None:
        """`driver` is None if NVIDIA's bindings are missing; torch alone then copies the region."""
        self._driver = driver
        self._device = device
        self._device_type = device_type
        self._region = region
        self._welcome = welcome
        self._registered: RegisteredRegion | None = None
        self._slab: SlabMapping | None = None
        self._releaser = None if driver is None else EventReleaser(driver)

    def region_writer(self) -> TensorWriter:
        registered = self.try_register()
        if self._driver is None or registered is None:
            return SharedMemoryWriter(self._region())
        return PinnedWriter(self._driver, self._device, registered)

    def region_reader(self) -> TensorReader:
        registered = self.try_register()
        if self._driver is None or registered is None or self._releaser is None:
            return CopyingReader(self._region(), self._device_type)
        return PinnedReader(self._driver, self._device, registered, self._releaser)

    def slab_writer(self) -> TensorWriter:
        return SlabWriter(self._need_driver(), self._device, self.slab)

    def slab_reader(self) -> TensorReader:
        self._need_driver()
        if self._releaser is None:
            raise CudaError("nothing waits for events")
        return SlabReader(self._device, self.slab, self._releaser)

    def slab(self) -> SlabMapping:
        """Mapping of the current store's slab; an earlier store's is unmapped with its last view.

        Raises:
            StoreUnavailableError: this store has none.
        """
        welcome = self._welcome()
        if self._slab is not None and self._slab.generation != welcome.generation:
            self._retire_slab()
        if welcome.slab is None:
            raise StoreUnavailableError("the store has no device memory")
        if self._slab is None:
            self._slab = SlabMapping(self._need_driver(), welcome.slab, welcome.generation)
        return self._slab

    def call_when_done(self, on_done: OnDone) -> None:
        """Have a thread call `on_done` once everything on the current stream has been done.

        Raises:
            CudaError: NVIDIA's bindings are missing, so nothing can be queued either.
        """
        if self._releaser is None:
            raise CudaError("nothing waits for events")
        self._releaser.call_after(self._device.current_stream(), on_done)

    def suspend_slab(self) -> None:
        """Unmap the slab behind its last user, because its store is away: a new one needs the memory.

        May be called in any thread, as `resume_slab`.
        """
        if (slab := self._slab) is not None:
            slab.retire()

    def resume_slab(self, generation: int) -> None:
        """Use the slab again if its store, which has `generation`, was never gone."""
        if (slab := self._slab) is not None and slab.generation == generation:
            slab.resume()

    def device_uuid(self) -> str | None:
        """UUID of this worker's GPU or MIG part; None if NVIDIA's bindings are missing."""
        return None if self._driver is None else self._driver.device_uuid()

    def probe_slab(self) -> None:
        """Map the slab and copy its first and last byte: only what worked once is announced.

        Raises:
            StoreUnavailableError: this store has none.
            CudaError: it cannot be used from here.
        """
        driver, slab = self._need_driver(), self.slab()
        if (here := device_memory(driver.device_uuid())) != slab.info.memory:
            raise CudaError(f"the slab is in {slab.info.memory}, this worker's memory is {here}")
        target = self._device.empty((1, 1), torch.float32)
        try:
            with slab.used(0, slab.info.num_bytes) as first:
                for source in (first, first + slab.info.num_bytes - 1):
                    driver.memcpy_async(target.data_ptr(), source, 1, self._device.current_stream())
                wait_for_current(driver, self._device)
        except CudaError:
            self._retire_slab()  # the next probe tries again
            raise

    def slab_extent(self) -> tuple[int, int] | None:
        slab = self._slab
        return None if slab is None or not slab.is_mapped else (slab.address, slab.info.num_bytes)

    def close(self) -> None:
        """Close; the slab stays mapped while vLLM holds views of it."""
        self._retire_slab()
        if self._releaser is not None:
            self._releaser.close()
        if self._registered is not None:
            self._registered.close()

    def _retire_slab(self) -> None:
        if self._slab is not None:
            self._slab.retire()
            self._slab = None

    def _need_driver(self) -> CudaDriver:
        if self._driver is None:
            raise CudaError("NVIDIA's Python bindings are not installed")
        return self._driver

    def try_register(self) -> RegisteredRegion | None:
        """Register the region once for the process; None if it cannot be, or there are no bindings."""
        if self._registered is None and self._driver is not None:
            try:
                self._registered = RegisteredRegion(self._driver, self._region())
            except CudaError as error:
                log.warning("region not registered with CUDA, copies are slower", error=str(error))
        return self._registered


class CopyingReader:
    """Reader that copies with torch, while the engine's thread waits."""

    def __init__(self, mapping: RegionMapping, device_type: str) -> None:
        self._mapping = mapping
        self._device_type = device_type

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        copy = tensor_view(self._mapping, descriptor).to(self._device_type, copy=True)
        on_release()  # not when the copy failed
        return copy

    def close(self) -> None:
        pass
