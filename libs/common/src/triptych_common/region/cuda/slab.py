"""Slab: device memory that the store owns, and what its clients see of it. No torch."""

import contextlib
import threading

from triptych_common.protocol.store import Descriptor, SlabInfo, device_memory
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.fence import StaleDescriptorError


class DeviceSlab:
    """The store's end: allocated once, told to every client, freed when the store ends."""

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Raises CudaError: the GPU has not so much memory, or shares none between processes."""
        self._driver = driver
        self._address = driver.malloc(num_bytes)
        try:
            handle = driver.ipc_get_handle(self._address)
            memory = device_memory(driver.device_uuid())
            self.info = SlabInfo(memory=memory, num_bytes=num_bytes, ipc_handle=handle.hex())
        except BaseException:
            driver.free(self._address)
            raise

    def close(self) -> None:
        with contextlib.suppress(CudaError):  # the end of the process frees it too
            self._driver.free(self._address)


class SlabMapping:
    """A client's mapping, made when it is first needed. Stays while anything holds it."""

    def __init__(self, driver: CudaDriver, info: SlabInfo, generation: int) -> None:
        """`generation`: of the store that told of the slab, so of everything in it."""
        self._driver = driver
        self._generation = generation
        self._lock = threading.Lock()
        self._address: int | None = None
        self.info = info

    @property
    def address(self) -> int:
        """Where the slab starts in this process.

        Raises:
            CudaError: it cannot be mapped.
        """
        with self._lock:
            if self._address is None:
                self._address = self._driver.ipc_open(bytes.fromhex(self.info.ipc_handle))
            return self._address

    def address_of(self, offset: int, num_bytes: int) -> int:
        """Of bytes [offset, offset + num_bytes).

        Raises:
            ValueError: they are not inside the slab.
            CudaError: the slab cannot be mapped.
        """
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > self.info.num_bytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} are outside the slab")
        return self.address + offset

    def check(self, descriptor: Descriptor) -> None:
        """The fence: a slab ends with its store, so what is in it is of one generation.

        Raises:
            StaleDescriptorError: the descriptor is of another store's slab.
        """
        if descriptor.memory != self.info.memory or descriptor.generation != self._generation:
            raise StaleDescriptorError(descriptor)

    def close(self) -> None:
        """Unmap. Nothing may use the memory any more. May be called twice."""
        with self._lock, contextlib.suppress(CudaError):  # the store may have ended
            if self._address is not None:
                address, self._address = self._address, None
                self._driver.ipc_close(address)
