"""Stages of the time until the first chunk, one after the other, without gaps."""

from enum import StrEnum


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
        """End the encode at `sealed_at`, if that is after the dispatch."""
        self.end(Stage.ENCODE, min(sealed_at, now))

    def as_ms(self) -> dict[Stage, float]:
        """Return milliseconds of the stages that have ended."""
        spent: dict[Stage, float] = {}
        for stage, since, until in self.segments:
            spent[stage] = spent.get(stage, 0.0) + until - since
        return {stage: round(seconds * 1e3, 3) for stage, seconds in spent.items()}
