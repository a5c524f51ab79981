"""Requests in the hands of a played vLLM, and the steps that its worker has."""

from dataclasses import dataclass
from typing import NamedTuple

from tests.support.vllm_connector.scheduled import EncoderReferences, Scheduled
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.item_pins import EngineItemState


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
