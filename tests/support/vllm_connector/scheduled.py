"""Requests in the hands of a played vLLM: what the stand-ins for its scheduler have in common."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tests.support.vllm_connector.fake_engine import FakeRequest


@dataclass(kw_only=True)
class Scheduled:
    """One request. `computed` is what was scheduled; the worker may be a step behind."""

    request: FakeRequest
    prompt_len: int
    prefix: int = 0  # tokens that the KV prefix cache covers now
    computed: int = 0  # tokens scheduled so far
    epoch: int = 0  # times preempted
    inputs: set[int] = field(default_factory=set)  # places whose item it refers to in the encoder cache

    @property
    def engine_request_id(self) -> str:
        return self.request.request_id

    def end_of(self, place: int) -> int:
        position = self.request.mm_features[place].mm_position
        return position.offset + position.length

    def places_in(self, start: int, end: int) -> Iterator[tuple[int, str, int, bool]]:
        """(place, item, first token, does the window read embeddings?) of placeholders in [start, end)."""
        for place, feature in enumerate(self.request.mm_features):
            position = feature.mm_position
            if position.offset < end and start < position.offset + position.length:
                first = position.offset + 1  # the placeholder begins and ends with a mark
                reads = first < end and start < first + position.num_embeds
                yield place, feature.identifier, position.offset, reads


RunningT = TypeVar("RunningT", bound=Scheduled)


class EncoderReferences(Generic[RunningT]):
    """Which requests refer to which items, as vLLM's encoder cache manager counts them."""

    live: dict[str, RunningT]
    cached: dict[str, set[str]]  # by item: the requests that refer to it

    def _refer(self, each: Scheduled, place: int) -> None:
        each.inputs.add(place)
        self.cached[each.request.mm_features[place].identifier].add(each.engine_request_id)

    def _free_input(self, each: Scheduled, place: int) -> None:
        item = each.request.mm_features[place].identifier
        each.inputs.discard(place)
        if item in self.cached and not any(
            each.request.mm_features[other].identifier == item for other in each.inputs
        ):
            self.cached[item].discard(each.engine_request_id)

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        return engine_request_id in self.live and item_index in self.live[engine_request_id].inputs
