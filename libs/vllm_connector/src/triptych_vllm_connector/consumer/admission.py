"""Admission records: what PD's engine knows of each request that needs remote items. Pure.

    NEW --admit--> QUEUED --granted--> GRANTED --all items ready--> (vLLM schedules it)
                     |                    |
                     `------- fail -------+--> FAILED
    preempted, or a prefix that shrank: back to NEW, with nothing held

Space is asked for and granted by place (`item_index`): one image may stand at several places of a prompt,
and a request that is served item by item may be done with one of them long before it has the next.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from triptych_common.protocol.messages import ECTransferParams
from triptych_vllm_connector.consumer.preallocator import Need

_MM_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Feature:
    """One media item of a request, as the scheduler sees it."""

    item_index: int
    mm_hash: str
    num_embeds: int
    end: int  # first token position behind its placeholder
    start: int = 0  # first token position of its placeholder


@dataclass
class Admission:
    """One request. `engine_id` is vLLM's id, `wire_id` the gateway's."""

    engine_id: str
    wire_id: str
    gateway: str | None
    traceparent: str | None
    features: tuple[Feature, ...]
    first_seen_ns: int
    is_local: bool = False  # encoded by this instance: it needs space, and no tensor of others
    waits: bool = False  # the last word about it was no
    asked: set[int] = field(default_factory=set)  # item indexes that space was asked for, until it ends
    granted: set[int] = field(default_factory=set)  # those of them that have space in the encoder cache
    fault: str | None = None  # why it cannot be served at all (see `fault_of`)
    failure: str | None = None
    grant_recorded: bool = False
    parked_ns: int | None = None
    parked_at_step: int = 0
    _num_places: Counter[str] = field(default_factory=Counter)  # granted ones, by mm_hash

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

    def grant(self, item_index: int) -> None:
        """This place has space."""
        if item_index not in self.granted:
            self.granted.add(item_index)
            self._num_places[self.features[item_index].mm_hash] += 1

    def drop(self, item_index: int) -> bool:
        """This place is done with. True: it was the last one of its item that had space."""
        self.asked.discard(item_index)
        if item_index not in self.granted:
            return False
        self.granted.discard(item_index)
        mm_hash = self.features[item_index].mm_hash
        self._num_places[mm_hash] -= 1
        if self._num_places[mm_hash]:
            return False
        del self._num_places[mm_hash]
        return True

    def drop_item(self, mm_hash: str) -> None:
        """All places of the item are done with."""
        for feature in self.features:
            if feature.mm_hash == mm_hash:
                self.drop(feature.item_index)


def fault_of(mm_features: list[Any], transfer_params: dict[str, Any] | None) -> str | None:
    """Why a request cannot be served at all; None: it can. Our HTTP port takes anything from anybody."""
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
    engine_id: str, mm_features: list[Any], transfer_params: dict[str, Any] | None, now_ns: int
) -> Admission:
    """`mm_features` are vLLM's `MultiModalFeatureSpec`s, sorted by position; `transfer_params` the
    request's `ec_transfer_params` (see `protocol.messages.ECTransferParams`)."""
    params = transfer_params or {}
    features = tuple(
        Feature(
            index,
            f.identifier,
            f.mm_position.get_num_embeds(),
            f.mm_position.offset + f.mm_position.length,
            f.mm_position.offset,
        )
        for index, f in enumerate(mm_features)
    )
    return Admission(
        engine_id=engine_id,
        wire_id=params.get("request_id", engine_id),
        gateway=params.get("gateway"),
        traceparent=params.get("traceparent"),
        features=features,
        first_seen_ns=now_ns,
    )
