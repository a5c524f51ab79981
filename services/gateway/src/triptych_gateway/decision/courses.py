"""Course: the predicted work of a request at its instance. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from triptych_gateway.decision.local_room import LocalPlace
from triptych_gateway.decision.prediction import BYTES_PER_TOKEN


class CourseKind(StrEnum):
    """Kinds of work before the first token."""

    TEXT = "text"  # prefill alone
    SIZES_KNOWN = "sizes_known"  # likewise: no encode is due
    REMOTE = "remote"  # encoders', then prefill
    LOCAL = "local"  # encode and prefill at the instance


@dataclass(frozen=True, slots=True)
class Course:
    """Predicted seconds of a request's work; 0 where nothing is known."""

    kind: CourseKind
    decided_at: float = 0.0  # monotonic seconds
    num_rows: float = 0.0  # that the instance encodes, or gets, and prefills
    num_text_tokens: float = 0.0
    text_s: float = 0.0  # the instance's, for the text
    encode_s: float = 0.0  # until its items are encoded and at its store; the instance's work is due then
    work_s: float = 0.0  # the instance's, before the first token
    is_measured: bool = False  # its first token says what such a request costs
    is_alone: bool = False  # and what its way takes on an idle system, where compute is shared
    place: LocalPlace | None = None  # that it gives back with its first token


def text_tokens(num_bytes: int) -> float:
    """Return the approximate number of tokens in a request of `num_bytes`."""
    return num_bytes / BYTES_PER_TOKEN
