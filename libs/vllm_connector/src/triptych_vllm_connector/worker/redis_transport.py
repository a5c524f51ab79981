"""Transport `redis`: the bytes of a tensor under a key of their own, read into memory of the consumer.

For hosts where no memory can be shared, and as the baseline. The store keeps its books as ever: the entry's
blocks stay empty.
"""

import contextlib

import torch

from triptych_common.coordination import BlobStore
from triptych_common.protocol.store import Descriptor
from triptych_common.region.tensor_view import TORCH_DTYPES
from triptych_common.region.transport import OnRelease, Place
from triptych_vllm_connector.readable import blob_place


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
