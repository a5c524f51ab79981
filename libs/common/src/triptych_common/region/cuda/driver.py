"""Narrow interface to CUDA. Tests have another implementation (`tests/support`).

Addresses, streams and events are integers, as CUDA's handles are. Stream 0 is the default stream. Every
method but `malloc`, the two that synchronize and the host registrations returns at once.
"""

from typing import Protocol

from triptych_common.domain.errors import TriptychError

IPC_HANDLE_NUM_BYTES = 64


class CudaError(TriptychError):
    """CUDA cannot be used here, or refused a call."""


class CudaDriver(Protocol):
    """One GPU, as one process sees it. Methods raise CudaError."""

    def bind_thread(self) -> None:
        """Make the GPU the calling thread's current one; each thread calls it first."""

    def device_uuid(self) -> str:
        """Return "GPU-" and the UUID of the GPU, or of this process's part of one (MIG)."""

    def pci_bus_id(self) -> str:
        """Return the GPU's address on the PCI bus, such as "0000:3b:00.0"."""

    def is_mps_client(self) -> bool:
        """Return whether this process computes through NVIDIA's Multi-Process Service."""

    def num_multiprocessors(self) -> int:
        """Return the multiprocessors that this process may use at once; an MPS limit reduces them."""

    # ---- memory ----
    def malloc(self, num_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def ipc_get_handle(self, address: int) -> bytes:
        """Return a handle by which another process opens memory from `malloc`."""

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's memory and return its address."""

    def ipc_close(self, address: int) -> None: ...

    def host_register(self, address: int, num_bytes: int) -> None:
        """Lock host memory in place, so that copies run at full speed and beside the host."""

    def host_unregister(self, address: int) -> None: ...

    def memcpy_async(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Copy between any two memories, in the order of `stream`."""

    # ---- order ----
    def stream_create(self) -> int:
        """Create a stream that does not wait for the default stream."""

    def stream_destroy(self, stream: int) -> None: ...

    def stream_synchronize(self, stream: int) -> None:
        """Wait for everything on `stream`."""

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Make later work on `stream` run after `event`."""

    def event_create(self) -> int: ...

    def event_record(self, event: int, stream: int) -> None: ...

    def event_query(self, event: int) -> bool:
        """Return whether everything before the event is done."""

    def event_synchronize(self, event: int) -> None:
        """Wait for the event, without holding up other Python threads."""

    def event_destroy(self, event: int) -> None: ...
