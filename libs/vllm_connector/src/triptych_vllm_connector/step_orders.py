"""What the encoder's host tells its worker about one item, through vLLM's `ec_transfer_params`."""

from dataclasses import dataclass

from triptych_common.protocol.store import SHM


@dataclass(frozen=True)
class WriteOrder:
    """Host -> worker: write this item's embeddings to this place, then seal it."""

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
