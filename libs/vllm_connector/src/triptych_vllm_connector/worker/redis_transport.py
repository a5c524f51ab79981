"""Transport `redis`: the bytes of a tensor under a key of their own, read into memory of the consumer.

For hosts where no memory can be shared, and as the baseline. The store keeps its books as ever: the entry's
blocks stay empty.
"""

import contextlib

import torch

from triptych_common.coordination import BlobStore
from triptych_common.protocol.store import REDIS, SHM, Descriptor
from triptych_common.region.tensor_view import TORCH_DTYPES
from triptych_common.region.transport import OnRelease, Place
from triptych_vllm_connector.scheduler.slab_probe import UsableSlab


def blob_place(place: Place) -> str:
    """Of one reservation: no two that live at the same time have the same generation and offset.

    So an order of an earlier store's writes to a key that no descriptor of a later one names.
    """
    return f"{place.mm_hash}.{place.generation}.{place.offset}"


class Readable:
    """Whether a consumer can read an entry. Asks Redis, whose bytes may be gone; else they stay longer."""

    def __init__(self, slab: UsableSlab, blobs: BlobStore) -> None:
        self._slab = slab
        self._blobs = blobs

    def __call__(self, descriptor: Descriptor) -> bool:
        """Raises BusUnavailableError when Redis cannot be asked."""
        if descriptor.memory == REDIS:
            return self._blobs.renew_tensor(blob_place(descriptor), descriptor.spec.num_bytes)
        if descriptor.memory == SHM:
            return True
        return self._slab.holds(descriptor)


class RedisWriter:
    """Copies to the host if need be, and sends."""

    def __init__(self, blobs: BlobStore) -> None:
        self._blobs = blobs

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        flat = tensor.detach().contiguous().cpu().view(torch.uint8).reshape(-1)
        self._blobs.put(blob_place(place), memoryview(flat.numpy()))

    def close(self) -> None:
        self._blobs.close()


class RedisReader:
    """Fetches into memory of its own, so the pin ends at once."""

    def __init__(self, blobs: BlobStore, device: str) -> None:
        self._blobs = blobs
        self._device = device

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        spec = descriptor.spec
        data = bytearray(self._blobs.get(blob_place(descriptor), spec.num_bytes))
        tensor = torch.frombuffer(data, dtype=TORCH_DTYPES[spec.dtype]).view(spec.shape).to(self._device)
        on_release()
        return tensor

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._blobs.close()
