"""Requests in the hands of a played vLLM, and the steps that its worker has."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from tests.support.vllm_connector.fake_engine import FakeRequest
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.item_pins import EngineItemState


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
    """References of requests to items, as vLLM's encoder cache manager counts them."""

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


@dataclass(kw_only=True)
class Running(Scheduled):
    """One request in vLLM's hands."""

    gateway: str
    request_id: str
    attempt: int
    has_begun: bool = False  # its first token is out
    is_done: bool = False  # its last token is computed with a step under way
    is_wrong: bool = False  # a step of it read zeros


class Window(NamedTuple):
    """Tokens of a request that a step computes; of a decode, the last step, none."""

    engine_request_id: str
    epoch: int
    start: int
    end: int


class Step(NamedTuple):
    """One that the worker has, and of which no output was handled."""

    windows: tuple[Window, ...]
    loads: frozenset[str]
    lost: frozenset[str]  # of these: zeros were put in their place


class EncoderInputs(EncoderReferences[Running]):
    """The part of `ConsumerActor` that plans and holds the items of its requests."""

    consumer: Consumer
    step_tokens: int
    freed: list[str]
    encodes: list[str]  # items of the step under construction that the tower makes
    has_news: bool

    def _plan(self, each: Running, start: int) -> tuple[int, list[tuple[int, str]]]:
        """`_try_schedule_encoder_inputs`: clips the step at the first item that is not here."""
        end = min(each.prompt_len, start + self.step_tokens)
        loads: list[tuple[int, str]] = []
        for place, item, first, reads in each.places_in(start, end):
            if item in [load for _, load in loads]:
                loads.append((place, item))
            elif item in self.cached:
                self._refer(each, place)
            elif self.consumer.status(each.engine_request_id).is_local:
                if not self.consumer.status(each.engine_request_id).may_encode(place):
                    return max(start, first), loads
                if reads:
                    loads.append((place, item))
            elif self.consumer.item_state(item) is not EngineItemState.PINNED:
                assert self.consumer.item_state(item) is not EngineItemState.RESIDENT, (
                    "the worker has it, vLLM does not know"
                )
                return max(start, first), loads
            elif reads:
                loads.append((place, item))
        return end, loads

    def _allocate(self, each: Running, loads: list[tuple[int, str]]) -> None:
        for place, item in loads:
            if item not in self.cached:
                self.cached[item] = set()
                self.consumer.load_item(each.engine_request_id, item)
                if self.consumer.status(each.engine_request_id).is_local:
                    self.encodes.append(item)
            self._refer(each, place)

    def _free_input(self, each: Scheduled, place: int) -> None:
        super()._free_input(each, place)
        item = each.request.mm_features[place].identifier
        if self.cached.get(item) == set() and self.consumer.item_state(item) is not EngineItemState.RESIDENT:
            self.evict_item(item)

    def evict_item(self, item: str) -> None:
        if any(self.consumer.status(each).is_local for each in self.cached.get(item, ())):
            return  # it goes with its last reference
        if self.cached.pop(item, None) is not None:
            self.freed.append(item)
            self.has_news = True  # vLLM steps once more
