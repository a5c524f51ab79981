"""Admission records: what PD's engine knows of each request that needs remote items. Pure.

    NEW --admit--> QUEUED --granted--> GRANTED --all items ready--> (vLLM schedules it)
                     |                    |
                     `------- fail -------+--> FAILED
    preempted, or a prefix that shrank: back to NEW, with nothing held
"""

from dataclasses import dataclass, field
from typing import Any

from triptych_vllm_connector.preallocator import Need


@dataclass(frozen=True)
class Feature:
    """One media item of a request, as the scheduler sees it."""

    item_index: int
    mm_hash: str
    num_embeds: int
    end: int  # first token position behind its placeholder


@dataclass
class Admission:
    """One request. `engine_id` is vLLM's id, `wire_id` the gateway's."""

    engine_id: str
    wire_id: str
    gateway: str | None
    traceparent: str | None
    features: tuple[Feature, ...]
    first_seen_ns: int
    granted: set[str] = field(default_factory=set)  # mm_hashes with space in the encoder cache
    is_first_pass: bool = True
    failure: str | None = None
    grant_recorded: bool = False
    parked_ns: int | None = None
    parked_at_step: int = 0

    @property
    def last_end(self) -> int:
        return self.features[-1].end

    def needs_after(self, num_computed_tokens: int) -> list[Need]:
        """Distinct items whose placeholders the KV cache does not cover yet, in prompt order."""
        needs: dict[str, Need] = {}
        for feature in self.features:
            if feature.end > num_computed_tokens and feature.mm_hash not in needs:
                needs[feature.mm_hash] = Need(feature.mm_hash, feature.num_embeds)
        return list(needs.values())

    def covered_by(self, num_computed_tokens: int) -> list[Feature]:
        return [feature for feature in self.features if feature.end <= num_computed_tokens]

    def features_of(self, mm_hash: str) -> list[Feature]:
        return [feature for feature in self.features if feature.mm_hash == mm_hash]

    def is_last_use(self, mm_hash: str, item_index: int) -> bool:
        """Is this the last place in the prompt where the item stands?"""
        return self.features_of(mm_hash)[-1].item_index == item_index


def make_admission(
    engine_id: str, mm_features: list[Any], transfer_params: dict[str, Any] | None, now_ns: int
) -> Admission:
    """`mm_features` are vLLM's `MultiModalFeatureSpec`s, sorted by position; `transfer_params` the
    request's `ec_transfer_params` (see `protocol.messages.ECTransferParams`)."""
    params = transfer_params or {}
    features = tuple(
        Feature(index, f.identifier, f.mm_position.get_num_embeds(), f.mm_position.offset + f.mm_position.length)
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
