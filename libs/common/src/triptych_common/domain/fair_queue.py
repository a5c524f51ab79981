"""Fair queue of classes and flows that wait for the same work. Pure: no clock, no I/O.

A flow shares its slots: the jobs of one tenant, or of one API key. A fair-queue key is a flow within a class.

Between classes: a higher one goes first, unless a lower one that waits has been passed over `MAX_PASSED`
times in a row. Then the class that was passed over most often goes first. So with n classes a class that
waits gets one slot in `MAX_PASSED` + n - 1 at least.

Between the flows of a class: start-time fair queueing (Goyal, Vin and Cheng, 1996). The class has a clock
that shows the start of its latest slot. A flow's slot starts when its last one ended, or now by that clock if
that is later; it ends as much later as its work costs. The earliest start goes first. The shares of two
waiting flows differ by at most one slot's cost of each, however much one of them asks for; a new flow waits
for at most one slot of each other flow, and an idle flow saves nothing up.
"""

from collections.abc import Collection
from typing import NamedTuple

from triptych_common.protocol.messages import EncodeClass, ImageProperties, Modality

MAX_PASSED = 8
LEVELS: dict[EncodeClass, int] = {each: level for level, each in enumerate(EncodeClass)}
MAX_WAIT_SLOTS = MAX_PASSED + len(LEVELS) - 1
"""Longest wait of a class for its slot, in slots."""
_KEPT_FLOWS = 256  # ends of idle flows are forgotten beyond that many


MIN_COST = 0.25  # cost of the smallest image: each item is some work
COSTS = {Modality.IMAGE: 1.0, Modality.AUDIO: 1.0, Modality.VIDEO: 16.0}  # for items whose header has no size


def slot_cost(modality: Modality, image: ImageProperties | None) -> float:
    """Return the cost of an item's encode in megapixels, with which encode time grows."""
    return COSTS[modality] if image is None else max(image.num_pixels / 1e6, MIN_COST)


class FairKey(NamedTuple):
    """A flow within a class: the unit that waits for slots."""

    encode_class: EncodeClass = EncodeClass.INTERACTIVE
    flow: str = ""


DEFAULT_KEY = FairKey()


class FairQueue:
    """Record of which keys had slots. The caller owns the queues and passes what waits."""

    def __init__(self) -> None:
        self._clocks = dict.fromkeys(EncodeClass, 0.0)
        self._passed = dict.fromkeys(EncodeClass, 0)
        self._ends: dict[FairKey, float] = {}  # by its class's clock

    def copy(self) -> "FairQueue":
        """Return a copy, to simulate later slots."""
        other = FairQueue()
        other._clocks, other._passed = dict(self._clocks), dict(self._passed)
        other._ends = dict(self._ends)
        return other

    def next_key(self, waiting: Collection[FairKey]) -> FairKey:
        """Return the key of the non-empty `waiting` whose slot is next; the first of equals."""
        classes = {key.encode_class for key in waiting}
        chosen = min(classes, key=LEVELS.__getitem__)
        overdue = [each for each in classes if self._passed[each] >= MAX_PASSED]
        if overdue:
            chosen = min(overdue, key=lambda each: (-self._passed[each], LEVELS[each]))
        return min((key for key in waiting if key.encode_class is chosen), key=self.start_of)

    def take_slot(self, key: FairKey, cost: float, waiting: Collection[FairKey]) -> None:
        """Give `key` a slot; `waiting` are all keys that waited for it.

        Keys without room count too: they are passed over all the same.
        """
        start = self.start_of(key)
        self._clocks[key.encode_class] = max(self._clocks[key.encode_class], start)
        self._ends[key] = start + cost
        classes = {each.encode_class for each in waiting} - {key.encode_class}
        for each in self._passed:
            self._passed[each] = self._passed[each] + 1 if each in classes else 0
        if len(self._ends) > _KEPT_FLOWS + len(waiting):
            self._ends = {
                each: end for each, end in self._ends.items() if end > self._clocks[each.encode_class]
            }

    def start_of(self, key: FairKey) -> float:
        """Return when the key's next slot starts, on its class's clock."""
        return max(self._clocks[key.encode_class], self._ends.get(key, 0.0))
