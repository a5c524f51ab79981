"""History of the media items of one request. Pure; times are monotonic seconds."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ItemSource(StrEnum):
    """Sources of an item's tensor. All but ENCODED are encodes that were avoided."""

    ENCODED = "encoded"  # an encoder made it for this request
    JOINED = "joined"  # an encoder made it anyway, for another request
    MEMORY = "memory"  # the gateway knew its sizes, and no encode was needed
    REDIS = "redis"  # sizes known from Redis
    STORE = "store"  # an encoder was asked, and found it in the store


@dataclass(slots=True)
class ItemTiming:
    """History of one item: sizes and times, nothing of its content or its identity."""

    modality: str
    num_bytes: int
    num_places: int = 1  # of the request that name it
    num_rows: int | None = None  # of the encoder's output
    source: ItemSource | None = None  # None: nothing is known yet, or no encoder was asked
    ordered_at: float | None = None  # or joined
    sized_at: float | None = None
    sealed_at: float | None = None
    encode_s: float = 0.0  # the engine's time, which ends about at the seal
    encoder: str = ""
    encode_place: str | None = None  # why its job went to the encoders of that store
    encode_store: str | None = None

    @property
    def awaits_seal(self) -> bool:
        """True if an encoder has a job for it and has not reported the seal."""
        return self.sealed_at is None and self.source in (ItemSource.ENCODED, ItemSource.JOINED)

    def on_known(self, source: ItemSource) -> None:
        """Record that its sizes are known from before."""
        self.source = source

    def on_joined(self, now: float) -> None:
        """Record that an encoder already has a job for it, for another request."""
        self.source = ItemSource.JOINED
        if self.ordered_at is None:
            self.ordered_at = now

    def on_ordered(self, now: float) -> None:
        """Record that a job is ordered for it, perhaps once more."""
        self.ordered_at = now
        if self.source is not ItemSource.JOINED:
            self.source = ItemSource.ENCODED

    def on_placed(self, store: str, reason: str) -> None:
        """Record that its job is published, for the encoders of `store`."""
        self.encode_store, self.encode_place = store, reason

    def on_sizes(self, num_rows: int, now: float) -> None:
        self.num_rows = num_rows
        if self.sized_at is None:
            self.sized_at = now

    def on_sealed(self, encoder: str, encode_s: float, now: float) -> None:
        """Record the seal; with `encode_s` 0 the store had it and nothing was encoded."""
        self.sealed_at, self.encode_s = now, encode_s
        self.encoder = encoder or self.encoder
        if not encode_s and self.source is ItemSource.ENCODED:
            self.source = ItemSource.STORE

    def as_json(self, arrived_at: float) -> dict[str, Any]:
        """Return times in milliseconds since the request's arrival."""
        moments = {"ordered": self.ordered_at, "sized": self.sized_at, "sealed": self.sealed_at}
        return {
            "modality": self.modality,
            "num_bytes": self.num_bytes,
            "num_places": self.num_places,
            "num_rows": self.num_rows,
            "source": self.source,
            **{f"{name}_ms": None if at is None else in_ms(at - arrived_at) for name, at in moments.items()},
            "encode_ms": in_ms(self.encode_s),
            "encoder": self.encoder,
            "encode_store": self.encode_store,
            "encode_place": self.encode_place,
        }


def in_ms(seconds: float) -> float:
    """Return milliseconds, rounded to a tenth."""
    return round(seconds * 1e3, 1)
