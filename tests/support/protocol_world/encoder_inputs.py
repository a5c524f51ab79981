"""The encoder cache of a played vLLM, and where it clips a step."""

from tests.support.protocol_world.steps import Running
from triptych_vllm_connector.consumer.consumer import Consumer


class EncoderInputs:
    """The part of `ConsumerActor` that plans and holds the items of its requests."""

    consumer: Consumer
    step_tokens: int
    live: dict[str, Running]
    cached: dict[str, set[str]]
    freed: list[str]
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
            elif not self.consumer.is_pinned(item):
                assert not self.consumer.is_resident(item), "the worker has it, vLLM does not know"
                return max(start, first), loads
            elif reads:
                loads.append((place, item))
        return end, loads

    def _allocate(self, each: Running, loads: list[tuple[int, str]]) -> None:
        for place, item in loads:
            if item not in self.cached:
                self.cached[item] = set()
                self.consumer.load_item(each.engine_request_id, item)
            self._refer(each, place)

    def _refer(self, each: Running, place: int) -> None:
        each.inputs.add(place)
        self.cached[each.request.mm_features[place].identifier].add(each.engine_request_id)

    def _free_input(self, each: Running, place: int) -> None:
        item = each.request.mm_features[place].identifier
        each.inputs.discard(place)
        if item in self.cached and not any(
            each.request.mm_features[other].identifier == item for other in each.inputs
        ):
            self.cached[item].discard(each.engine_request_id)

    def is_in_use(self, engine_request_id: str, item_index: int) -> bool:
        """Of vLLM's encoder cache manager."""
        return engine_request_id in self.live and item_index in self.live[engine_request_id].inputs

    def evict_item(self, item: str) -> None:
        if self.cached.pop(item, None) is not None:
            self.freed.append(item)
            self.has_news = True  # vLLM steps once more
