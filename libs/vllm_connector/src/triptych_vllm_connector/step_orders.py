"""Orders of the host and the scheduler to a worker, one item each. Without vLLM.

A WriteOrder goes through vLLM's `ec_transfer_params`, then with the step, like a LoadOrder (`step_metadata`).
"""

from dataclasses import dataclass
from typing import NamedTuple

from triptych_common.protocol.store import SHM, Descriptor


@dataclass(frozen=True)
class WriteOrder:
    """Encoder's host -> worker: write this item's embeddings to this place, then seal it."""

    mm_hash: str
    job_id: str
    reservation_id: int
    offset: int  # bytes from the start of `memory`
    num_embeds: int
    width: int
    dtype: str
    traceparent: str | None = None
    generation: int = 1
    memory: str = SHM


@dataclass(frozen=True)
class LoadOrder:
    """Scheduler -> worker: load this pinned tensor into the encoder cache; the pin passes to the worker."""

    mm_hash: str
    pin_id: int
    descriptor: Descriptor
    traceparent: str | None = None


class LoadedTensor(NamedTuple):
    """Worker -> scheduler: one tensor loaded into vLLM's encoder cache."""

    transport: str
    num_bytes: int
    seconds: float
