"""Admission: prefill_decode's record of one request that needs remote items. Pure.

    NEW --ask--> QUEUED --grant--> GRANTED --last granted place done--> NEW, or QUEUED for the rest
     |             |                  |
     `-------------+------ fail ------+--> FAILED
    preempted, or the cached prefix shrank: back to NEW, with nothing held

NEW: nothing is asked for: at first, after a preemption, and behind the last item. QUEUED: space was asked
for, and none is held. GRANTED: there is space for all that was asked for; of a request that is larger than
the budget, for the first places. vLLM schedules it while all granted items are here, or enough tokens in
front of the first that is not (see `overlap`). FAILED: vLLM ends it at its next step; until then it keeps
what it holds.

Space is asked for and granted by place (`item_index`): one image may stand at several places of a prompt,
and a request that is served item by item may be done with one of them long before it has the next.

`RequestTable` changes admissions; every other module only reads them.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from pydantic import ValidationError

from triptych_common.domain.transitions import check_transition
from triptych_common.protocol.messages import ECTransferParams
from triptych_vllm_connector.consumer.overlap import Readiness
from triptych_vllm_connector.consumer.preallocator import Need
from triptych_vllm_connector.pieces import group_pieces, item_of

_MM_HASH = re.compile(r"[0-9a-f]{64}")


class AdmissionState(Enum):
    NEW = auto()
    QUEUED = auto()
    GRANTED = auto()
    FAILED = auto()


ALLOWED: dict[AdmissionState, frozenset[AdmissionState]] = {
    AdmissionState.NEW: frozenset({AdmissionState.QUEUED, AdmissionState.FAILED}),
    AdmissionState.QUEUED: frozenset({AdmissionState.GRANTED, AdmissionState.NEW, AdmissionState.FAILED}),
    AdmissionState.GRANTED: frozenset({AdmissionState.QUEUED, AdmissionState.NEW, AdmissionState.FAILED}),
    AdmissionState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class Feature:
    """One media item of a request, or a piece of one, as the scheduler sees it."""

    item_index: int
    mm_hash: str
    num_embeds: int
    end: int  # first token position behind its placeholder
    start: int = 0  # first token position of its placeholder
    media_index: int = 0  # of the item among the request's media, as its gateway counts them
    media_hash: str = ""  # the item's, of which `mm_hash` may be a piece
    num_pieces: int = 1  # of the item


@dataclass
class Admission:
    """One request: `engine_request_id` is vLLM's id, `request_id` the gateway's."""

    engine_request_id: str
    request_id: str
    gateway: str | None
    traceparent: str | None
    features: tuple[Feature, ...]
    first_seen_ns: int
    is_local: bool = False  # encoded by this instance: it needs space, and no tensor of others
    state: AdmissionState = AdmissionState.NEW
    failure: str | None = None  # why it is FAILED
    readiness: Readiness = Readiness.WAITS  # the last answer about it
    is_waiting: bool = False  # it may not be scheduled, and was not woken since
    asked_at: int = 0  # tokens in the KV cache when that was answered
    begins_whole: bool = False  # it does not run before all that it was granted is here
    asked: set[int] = field(default_factory=set)  # item indexes that space was asked for, until it ends
    granted: set[int] = field(default_factory=set)  # asked places that have space in the encoder cache
    num_places: Counter[str] = field(default_factory=Counter)  # granted ones, by mm_hash
    is_grant_recorded: bool = False
    parked_ns: int | None = None
    parked_at_step: int = 0
    num_missing: int = 0  # items that were not here when it was parked

    @property
    def has_failed(self) -> bool:
        return self.state is AdmissionState.FAILED

    @property
    def waits(self) -> bool:
        """True if the last answer was no and the request has not been woken since."""
        return self.is_waiting and not self.has_failed

    @property
    def is_partial(self) -> bool:
        """True if the last answer let the request run up to a missing item."""
        return self.readiness is Readiness.PART

    @property
    def may_be_scheduled(self) -> bool:
        """True if the last answer was yes, or the request has been woken since."""
        return self is not NOT_ASKED and not self.is_waiting and not self.has_failed

    def may_encode(self, item_index: int) -> bool:
        """True if this place of a local request has space."""
        return self.is_local and item_index in self.granted

    @property
    def last_end(self) -> int:
        return self.features[-1].end

    def needs_after(self, num_computed_tokens: int) -> list[Need]:
        """Places that the KV cache does not cover yet, in prompt order."""
        return [
            Need(feature.mm_hash, feature.num_embeds, feature.item_index)
            for feature in self.features
            if feature.end > num_computed_tokens
        ]

    def covered_by(self, num_computed_tokens: int) -> list[Feature]:
        return [feature for feature in self.features if feature.end <= num_computed_tokens]

    def places_of(self, mm_hash: str) -> list[Feature]:
        return [feature for feature in self.features if feature.mm_hash == mm_hash]


NOT_ASKED = Admission("", "", None, None, (), 0)
"""Stands for every request that the scheduler has not asked about; it is never changed."""


def move_admission(admission: Admission, to: AdmissionState) -> None:
    """Move `admission` to `to`; nothing else assigns `admission.state`.

    Raises:
        IllegalTransitionError: `to` cannot follow its state.
    """
    check_transition(ALLOWED, admission.engine_request_id, admission.state, to)
    admission.state = to


def fault_of(mm_features: list[Any], transfer_params: dict[str, Any] | None) -> str | None:
    """Reason why a request can never be served, or None; HTTP clients send its parameters unvalidated."""
    for feature in mm_features:
        if _MM_HASH.fullmatch(feature.identifier) is None:
            return f"the uuid {feature.identifier[:80]!r} is no mm_hash"
    if transfer_params is not None:
        try:
            ECTransferParams.model_validate(transfer_params)
        except ValidationError as error:
            return f"ec_transfer_params are not valid: {error.error_count()} faults"
    return None


def make_admission(
    engine_request_id: str,
    mm_features: list[Any],
    transfer_params: dict[str, Any] | None,
    now_ns: int,
    *,
    is_local: bool = False,
) -> Admission:
    """`mm_features` are vLLM's `MultiModalFeatureSpec`s, sorted by position; `transfer_params` the
    request's `ec_transfer_params` (see `protocol.messages.ECTransferParams`)."""
    params = transfer_params or {}
    pieces = (
        (media_index, len(group), piece)
        for media_index, group in enumerate(group_pieces(mm_features))
        for piece in group
    )
    features = tuple(
        Feature(
            index,
            f.identifier,
            f.mm_position.get_num_embeds(),
            f.mm_position.offset + f.mm_position.length,
            f.mm_position.offset,
            media_index,
            item_of(f),
            num_pieces,
        )
        for index, (media_index, num_pieces, f) in enumerate(pieces)
    )
    return Admission(
        engine_request_id=engine_request_id,
        request_id=params.get("request_id", engine_request_id),
        gateway=params.get("gateway"),
        traceparent=params.get("traceparent"),
        features=features,
        first_seen_ns=now_ns,
        is_local=is_local,
    )
