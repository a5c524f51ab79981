"""What came of one fault, and how it is judged.

Each failure is reported whole, as an error of its own: pytest shortens the text of an `assert`.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tests.support.fast.client import Answer
from tests.support.fast.processes.tally import Tally

TEXT = 4  # place of the text question among the answers

Accepts = Callable[[Answer], bool]


class CaseError(AssertionError):
    """Something is not as it must be; with all that is known about it."""


def is_right(answer: Answer) -> bool:
    return answer.is_right


def is_refused(answer: Answer) -> bool:
    """As an image must be that cannot be decoded."""
    return answer.code == "invalid_image"


def is_right_or_broke_off(answer: Answer) -> bool:
    """After the first token a stream can only end with an error."""
    return answer.is_right or (answer.has_begun and answer.code == "stream_interrupted")


def is_right_or_gone(answer: Answer) -> bool:
    return answer.is_right or answer.is_gone


def is_refused_or_gone(answer: Answer) -> bool:
    return is_refused(answer) or answer.is_gone


def is_right_or_documented_error(answer: Answer) -> bool:
    return answer.is_right or answer.is_documented_error


def is_anything(answer: Answer) -> bool:
    return True


@dataclass
class Case:
    """Filled in as it goes on."""

    title: str
    began_at: float = field(default_factory=time.monotonic)
    clock: datetime = field(default_factory=lambda: datetime.now(UTC))
    was_reached: bool = False
    answers: list[Answer] = field(default_factory=list)
    others: list[Answer] = field(default_factory=list)  # before, after, the bad image, the caller that left
    tally_before: Tally = field(default_factory=Tally)
    tally: Tally = field(default_factory=Tally)  # since then
    events: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def bad_image(self) -> Answer:
        return next(answer for answer in self.others if answer.question.text.startswith("bad"))

    def note(self, what: str) -> None:
        self.events.append(f"{time.monotonic() - self.began_at:7.3f} {what}")

    def __str__(self) -> str:
        parts = [
            f"{self.title}: {'reached' if self.was_reached else 'not reached'}",
            f"began at {self.clock.isoformat(timespec='milliseconds')}; all times in seconds since then",
            *self.events,
            "---- answers",
            *(answer.whole(self.began_at) for answer in [*self.answers, *self.others]),
            "---- encodes and takeovers, by (mm_hash, job)",
            *(f"{' '.join(key)}: {number} encodes" for key, number in self.tally.encodes.items()),
            *(f"{' '.join(key)}: taken {number} times" for key, number in self.tally.taken.items()),
            self.logs,
        ]
        return "\n".join(parts)


def check(answers: Iterable[Answer], accepts: Accepts = is_right, more: object = "") -> None:
    """All of `answers` are what they may be.

    Raises:
        CaseError: with those that are not, and with `more`.
    """
    __tracebackhide__ = True
    faults = _not_accepted(answers, accepts)
    if faults:
        raise CaseError("\n".join([*faults, str(more)]))


def judge(
    case: Case,
    answers: Accepts = is_right,
    *,
    text: Accepts | None = None,
    bad_image: Accepts = is_refused,
    most_jobs: int | None = None,
) -> None:
    """All of `case` is as it must be.

    Args:
        text: of the question without an image, if it is another than of the others.
        most_jobs: in which an encode of one item was begun. Not given: it is encoded twice at most, and once
            more for each takeover beyond the first (a lease may also end because its holder gets no time).

    Raises:
        CaseError: with the whole case.
    """
    __tracebackhide__ = True
    faults = _not_accepted(case.answers, answers)
    faults += _not_accepted([case.answers[TEXT]], text or answers)
    faults += _not_accepted([case.bad_image], bad_image)
    if most_jobs is None:
        takeovers = case.tally.num_takeovers
        encodes = case.tally.num_encodes.items()
        faults += [f"{n} encodes of {item}" for item, n in encodes if n > max(2, 1 + takeovers[item])]
    else:
        faults += [f"{n} jobs for {item}" for item, n in case.tally.num_jobs.items() if n > most_jobs]
    faults += [f"{n} encodes, fewer takeovers: {item}" for item, n in case.tally.beyond_takeovers.items()]
    if not case.tally.encodes:
        faults.append("nothing was encoded")
    if faults:
        raise CaseError("\n".join([*dict.fromkeys(faults), "", str(case)]))


def _not_accepted(answers: Iterable[Answer], accepts: Accepts) -> list[str]:
    return [
        f"not what it must be: {answer.whole(answer.asked_at)}" for answer in answers if not accepts(answer)
    ]
