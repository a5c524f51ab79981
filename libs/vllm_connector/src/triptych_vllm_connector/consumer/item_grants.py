"""Grants: space in the encoder cache for the items of requests, and pins for what has space."""

from collections.abc import Callable, Iterable

from triptych_vllm_connector.consumer.admission import Admission
from triptych_vllm_connector.consumer.item_pins import ItemPins
from triptych_vllm_connector.consumer.preallocator import Need, Preallocator
from triptych_vllm_connector.consumer.request_table import RequestTable
from triptych_vllm_connector.consumer.speech import Speech
from triptych_vllm_connector.consumer.waits import Waits


class Grants:
    """Between the preallocator, which decides about space, and the holdings, which get the tensors."""

    def __init__(
        self,
        requests: RequestTable,
        holdings: ItemPins,
        preallocator: Preallocator,
        speech: Speech,
        waits: Waits,
    ) -> None:
        self._requests = requests
        self._holdings = holdings
        self._items = holdings.items
        self._preallocator = preallocator
        self._speech = speech
        self._waits = waits
        self._is_in_use: Callable[[str, int], bool] = lambda request_id, item_index: False

    def bind(self, is_in_use: Callable[[str, int], bool]) -> None:
        """`is_in_use(request_id, item_index)`: has vLLM scheduled the item there?"""
        self._is_in_use = is_in_use

    def ask(self, admission: Admission, needs: list[Need]) -> bool:
        """Have space asked for, for exactly `needs`. False: one of them can never have it.

        The cached prefix may have shrunk since the last time: then it asks again as a whole, and holds
        nothing meanwhile. Or it has grown: then what it covers is given back.
        """
        wanted = {need.item_index for need in needs}
        unused = self._unused(admission, wanted)
        is_short = not wanted <= admission.asked
        if not is_short and not unused:
            return True
        for need in needs:
            if not self._preallocator.can_ever_hold(need):
                self._speech.declined(admission, admission.features[need.item_index], "too_large")
                why = f"an item of {need.num_embeds} rows is larger than the encoder cache"
                self._requests.fail(admission, why)
                self.wake_granted()
                return False
        for item_index in sorted(unused):
            self._speech.unused(admission, admission.features[item_index], "prefix_cached")
        self._drop(admission, set(admission.asked) if is_short else unused)
        admission.asked |= wanted
        rest = [need for need in needs if need.item_index not in admission.granted]
        if rest or self._preallocator.is_pending(admission.engine_id):
            self._granted(admission, self._preallocator.preallocate(admission.engine_id, rest))
        self.wake_granted()
        return True

    def is_ready(self, admission: Admission, needs: list[Need]) -> bool:
        """Is every item here? Of a request larger than the budget: every item that it was granted so far?"""
        granted = [need for need in needs if need.item_index in admission.granted]
        if len(granted) < len(needs) and (not granted or granted[0] is not needs[0]):
            return False
        return admission.is_local or all(self._items.is_ready(need.mm_hash) for need in granted)

    def give_back(self, admission: Admission) -> None:
        """Everything that the request holds or waits for."""
        self._preallocator.depreallocate(admission.engine_id)
        self._drop(admission, set(admission.asked))
        self.wake_granted()

    def give_back_place(self, admission: Admission, item_index: int) -> None:
        """The request is done with this place."""
        self._drop(admission, {item_index})
        self.wake_granted()

    def wake_granted(self) -> None:
        """Something was given back: who has space now?"""
        for engine_id, needs in self._preallocator.take_granted():
            admission = self._requests[engine_id]  # who waits for space lives
            self._granted(admission, needs)
            self.wake_if_ready(admission)

    def wake_if_ready(self, admission: Admission) -> None:
        """It leaves the parking if all that it was granted is here."""
        if not admission.granted:
            return
        features = (admission.features[index] for index in admission.granted)
        if admission.is_local or all(self._items.is_ready(feature.mm_hash) for feature in features):
            self._requests.wake(admission)

    def _unused(self, admission: Admission, wanted: set[int]) -> set[int]:
        """Places that were asked for, and that the KV cache covers without that they were ever scheduled."""
        covered = admission.asked - wanted
        return {index for index in covered if not self._is_in_use(admission.engine_id, index)}

    def _granted(self, admission: Admission, needs: Iterable[Need]) -> None:
        for need in needs:
            admission.grant(need.item_index)
            if admission.is_local:
                continue
            self._speech.granted(admission, admission.features[need.item_index])
            self._holdings.acquire(need.mm_hash, admission.engine_id)
            if self._items.num_rows(need.mm_hash) not in (None, need.num_embeds):
                why = f"the item has other rows than the {need.num_embeds} that are expected"
                self._requests.fail(admission, why)
        if admission.granted:
            self._waits.granted(admission)

    def _drop(self, admission: Admission, item_indexes: set[int]) -> None:
        """These places need no space. The caller lets others hear of it (`wake_granted`)."""
        for item_index in sorted(item_indexes):
            if admission.drop(item_index):  # the item's last place
                mm_hash = admission.features[item_index].mm_hash
                self._preallocator.deallocate(admission.engine_id, mm_hash)
                if not admission.is_local:
                    self._holdings.release(mm_hash, admission.engine_id)
