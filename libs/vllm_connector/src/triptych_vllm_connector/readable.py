"""Entries that an engine can read, by the memory that holds them, and the keys of tensors in Redis.

EngineCore asks `Readable` before it uses a pin; in the workers the transport `redis` uses the same keys.
"""

from triptych_common.coordination import BlobStore
from triptych_common.protocol.store import REDIS, SHM, Descriptor
from triptych_common.region.fence import Place
from triptych_vllm_connector.slab_probe import UsableSlab


def blob_place(place: Place) -> str:
    """Redis key of one reservation; no two living reservations share generation and offset.

    An order of an earlier store therefore writes to a key that no descriptor of a later store names.
    """
    return f"{place.mm_hash}.{place.generation}.{place.offset}"


class Readable:
    """Tells whether this consumer can read an entry; in Redis the check also extends the tensor's expiry."""

    def __init__(self, slab: UsableSlab, blobs: BlobStore) -> None:
        self._slab = slab
        self._blobs = blobs

    def __call__(self, descriptor: Descriptor) -> bool:
        """True if the entry can be read; raises BusUnavailableError if Redis cannot be asked."""
        if descriptor.memory == REDIS:
            return self._blobs.renew_tensor(blob_place(descriptor), descriptor.spec.num_bytes)
        if descriptor.memory == SHM:
            return True
        return self._slab.holds(descriptor)
