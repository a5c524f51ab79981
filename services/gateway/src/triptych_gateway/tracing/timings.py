"""Times of one request: the stages until its first chunk, and the history of its media items. Pure."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    """Stage between arrival and first chunk; each moment belongs to one."""

    BODY = "body"  # admitted, read, parsed
    QUEUE = "queue"  # until an instance is known that serves the model, and until it is decided who encodes
    MEDIA = "media"  # fetched, decoded, checked, digested; or put back where they are sent whole
    SIZES = "sizes"  # until encoders have said how long the items are
    GIVEN_UP = "given_up"  # on a way that came to nothing: encoders that did not deliver, or an instance
    ENCODE = "encode"  # sent to prefill_decode, until the last seal of an item that was ordered for it
    PREFILL = "prefill"  # the rest: until the first chunk


class FirstTokenStages:
    """Bookkeeping of stages. Pure: `now` and all times are monotonic seconds."""

    def __init__(self, arrived_at: float) -> None:
        self.arrived_at = arrived_at
        self.last_at = arrived_at  # when a stage last ended
        self.segments: list[tuple[Stage, float, float]] = []  # (stage, from, to), without gaps

    def end(self, stage: Stage, now: float) -> None:
        """End `stage`, which lasted since the previous end."""
        until = max(self.last_at, now)
        self.segments.append((stage, self.last_at, until))
        self.last_at = until

    def end_first_chunk(self, sealed_at: float | None, now: float) -> float:
        """End with the first chunk; return the seconds since the arrival.

        Args:
            sealed_at: the last seal that the gateway knows of, of an item that was encoded for this request.
        """
        if sealed_at is not None:
            self.end_encode(sealed_at, now)
        self.end(Stage.PREFILL, now)
        return self.last_at - self.arrived_at

    def end_encode(self, sealed_at: float, now: float) -> None:
        self.end(Stage.ENCODE, min(sealed_at, now))

    def as_ms(self) -> dict[Stage, float]:
        spent: dict[Stage, float] = {}
        for stage, since, until in self.segments:
            spent[stage] = spent.get(stage, 0.0) + until - since
        return {stage: round(seconds * 1e3, 3) for stage, seconds in spent.items()}


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
