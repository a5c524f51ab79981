"""How often which item was encoded in which job, and how often a job was taken over; by all encoders. And
how many requests, and how many with media that it encoded itself, each instance of the language model had.

A job is taken over when an encoder takes it after another, or the same one, has had it: its lease was over,
or Redis lost its data, and with them the owner of the job, so that it was sent again.
"""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from triptych_common.bus import Delivery
from triptych_common.protocol.messages import EncodeJob
from triptych_encoder.jobs.job_intake import JobIntake

ENCODE, TAKEN, SERVED, LOCAL, HELD = "encode", "taken", "served", "local", "held"
"""First words of the file's lines."""


@dataclass(frozen=True)
class Tally:
    """Encodes and takings of encoders are by `(mm_hash, job_id)`; of an item in pieces, the encodes of the
    piece that has most of them."""

    encodes: Counter[tuple[str, str]] = field(default_factory=Counter)
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)  # by instance: requests, or stages of them
    local: Counter[str] = field(default_factory=Counter)  # by instance: those whose media it encoded itself
    held: Counter[str] = field(default_factory=Counter)  # by instance: those with items in its KV cache

    @classmethod
    def read(cls, path: Path) -> Self:
        lines = [line.split() for line in path.read_text().splitlines()]
        encodes: Counter[tuple[str, str]] = Counter()
        for (mm_hash, job_id, _), number in Counter(
            tuple(rest) for what, *rest in lines if what == ENCODE
        ).items():
            encodes[mm_hash, job_id] = max(encodes[mm_hash, job_id], number)
        return cls(
            encodes,
            Counter((rest[0], rest[1]) for what, *rest in lines if what == TAKEN),
            Counter(rest[0] for what, *rest in lines if what == SERVED),
            Counter(rest[0] for what, *rest in lines if what == LOCAL),
            Counter(rest[0] for what, *rest in lines if what == HELD),
        )

    def since(self, before: "Tally") -> "Tally":
        return Tally(
            self.encodes - before.encodes,
            self.taken - before.taken,
            self.served - before.served,
            self.local - before.local,
            self.held - before.held,
        )

    @property
    def num_encodes(self) -> Counter[str]:
        """By mm_hash."""
        found: Counter[str] = Counter()
        for (mm_hash, _), number in self.encodes.items():
            found[mm_hash] += number
        return found

    @property
    def num_takeovers(self) -> Counter[str]:
        """By mm_hash."""
        found: Counter[str] = Counter()
        for (mm_hash, _), number in self.taken.items():
            found[mm_hash] += number - 1
        return found

    @property
    def num_jobs(self) -> Counter[str]:
        """Jobs in which an encode was begun, by mm_hash."""
        return Counter(mm_hash for mm_hash, _ in self.encodes)

    @property
    def beyond_takeovers(self) -> dict[str, int]:
        """Items that were encoded more than once and once per takeover, within one job: their encodes."""
        return {key[0]: number for key, number in self.encodes.items() if number > self.taken[key]}


def note_encode(path: Path, mm_hash: str, job_id: str, first_row: int) -> None:
    _append(path, ENCODE, mm_hash, job_id, str(first_row))


def note_served(path: Path, instance: str, *, is_local: bool = False) -> None:
    """`is_local`: the instance encodes the request's media itself."""
    _append(path, SERVED, instance)
    if is_local:
        _append(path, LOCAL, instance)


def note_held(path: Path, instance: str) -> None:
    """It has answered a request with items without a KV cache of another."""
    _append(path, HELD, instance)


def note_taken_jobs(path: Path) -> None:
    """Append to `path` each job that this process takes from now on."""
    intake: Any = JobIntake
    take_next = intake.__anext__

    async def noted(self: Any) -> Delivery:
        delivery: Delivery = await take_next(self)
        job = delivery.envelope.message
        if isinstance(job, EncodeJob):
            _append(path, TAKEN, job.mm_hash, job.job_id)
        return delivery

    intake.__anext__ = noted


def _append(path: Path, *words: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, f"{' '.join(words)}\n".encode())  # one write: encoders share the file
    finally:
        os.close(handle)
