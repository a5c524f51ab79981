"""Pin of an item in the store, passed from EngineCore to its workers. Without vLLM."""

from typing import NamedTuple

from triptych_common.protocol.store import Descriptor


class StorePin(NamedTuple):
    """A pinned tensor. Its holder ends the pin, once for each rank."""

    pin_id: int
    descriptor: Descriptor
    region_id: str  # in another region the descriptor means nothing
