"""Which entries an engine can read, by the memory in which they lie; and which key a tensor has in Redis.

In EngineCore `Readable` is asked before a pin is used; in the workers transport `redis` uses the same keys.
"""

from triptych_common.coordination import BlobStore
from triptych_common.protocol.store import REDIS, SHM, Descriptor
from triptych_common.region.fence import Place
from triptych_vllm_connector.slab_probe import UsableSlab


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
