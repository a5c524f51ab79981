"""Slab: device memory that the store owns, and its mapping in a client. No torch."""

import contextlib
import threading
from collections.abc import Iterator

from triptych_common.protocol.store import Descriptor, SlabInfo, device_memory
from triptych_common.region.cuda.driver import CudaDriver, CudaError
from triptych_common.region.fence import Place, StaleDescriptorError, StaleReservationError
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)


class DeviceSlab:
    """The store's end of the slab: allocated once, sent to every client.

    It ends with the process, never before: `cudaFree` of memory that a client has still mapped is undefined,
    and the store cannot know when the last one has unmapped it.
    """

    def __init__(self, driver: CudaDriver, num_bytes: int) -> None:
        """Allocate it. Raises CudaError: the GPU lacks memory, or shares none between processes."""
        self.pci_bus_id = driver.pci_bus_id()
        address = driver.malloc(num_bytes)
        try:
            handle = driver.ipc_get_handle(address)
            memory = device_memory(driver.device_uuid())
            self.info = SlabInfo(memory=memory, num_bytes=num_bytes, ipc_handle=handle.hex())
        except BaseException:
            driver.free(address)  # no client knows it yet
            raise


class SlabMapping:
    """A client's mapping of one store's slab; one per process, since CUDA opens a handle once in each.

    It is mapped at its first use. Users are views, and writes while they run; each ends when the GPU is done
    with it. `retire`: the store is away, or the process ends; the slab is unmapped when it has no users any
    more. `resume`: the same store is back.
    """

    def __init__(self, driver: CudaDriver, info: SlabInfo, generation: int) -> None:
        """Store the slab's place; `generation` is its store's, and so every entry's in it."""
        self._driver = driver
        self._lock = threading.Lock()
        self._address: int | None = None
        self._num_users = 0
        self._is_retired = False
        self.info = info
        self.generation = generation

    @property
    def address(self) -> int:
        """Address at which the slab starts in this process.

        Raises:
            CudaError: it cannot be mapped, or is not to be used any more.
        """
        with self._lock:
            return self._mapped()

    @property
    def is_mapped(self) -> bool:
        return self._address is not None

    def acquire(self, offset: int, num_bytes: int) -> int:
        """Return the address of bytes [offset, offset + num_bytes), which stay mapped until `release`.

        Raises:
            ValueError: they are not inside the slab.
            CudaError: the slab cannot be mapped, or is not to be used any more.
        """
        if offset < 0 or num_bytes <= 0 or offset + num_bytes > self.info.num_bytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} are outside the slab")
        with self._lock:
            address = self._mapped()
            self._num_users += 1
            return address + offset

    def release(self) -> None:
        """End one use, after the GPU is done with it. Takes a lock: not from finalizers."""
        with self._lock:
            self._num_users -= 1
            self._unmap_unused()

    @contextlib.contextmanager
    def used(self, offset: int, num_bytes: int) -> Iterator[int]:
        """Run the body between `acquire` and `release`; it waits for the GPU."""
        address = self.acquire(offset, num_bytes)
        try:
            yield address
        finally:
            self.release()

    def retire(self) -> None:
        """Refuse new users, and unmap when the last one is done. May be called twice."""
        with self._lock:
            self._is_retired = True
            self._unmap_unused()

    def resume(self) -> None:
        """Allow users again, because the store that owns the slab is still there."""
        with self._lock:
            self._is_retired = False

    def check(self, descriptor: Descriptor) -> None:
        """Check that the descriptor is of this store's slab: all entries in it are of one generation.

        Raises:
            StaleDescriptorError: the descriptor is of another store's slab.
        """
        if descriptor.memory != self.info.memory or descriptor.generation != self.generation:
            raise StaleDescriptorError(descriptor)

    def check_place(self, place: Place) -> None:
        """Check an order to write in the same way: offsets begin at 0 in every slab.

        Raises:
            StaleReservationError: the order is of another store's slab.
        """
        if place.generation != self.generation:
            raise StaleReservationError(place)

    def _mapped(self) -> int:
        if self._is_retired:
            raise CudaError("the slab is of a store that is away")
        if self._address is None:
            self._address = self._driver.ipc_open(bytes.fromhex(self.info.ipc_handle))
        return self._address

    def _unmap_unused(self) -> None:
        if not self._is_retired or self._num_users or self._address is None:
            return
        address, self._address = self._address, None
        try:
            self._driver.bind_thread()  # the last user may be done in any thread
            self._driver.ipc_close(address)
        except CudaError as error:
            log.warning("slab not unmapped", memory=self.info.memory, error=str(error))
