"""What the encoder's host tells its worker about one item, through vLLM's `ec_transfer_params`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WriteOrder:
    """Host -> worker: write this item's embeddings into these blocks of the region, then seal them."""

    mm_hash: str
    job_id: str
    reservation_id: int
    offset: int  # bytes from the start of the region
    num_embeds: int
    width: int
    dtype: str
    traceparent: str | None = None
