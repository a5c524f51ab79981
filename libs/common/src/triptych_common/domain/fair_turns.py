"""Fairness among classes and flows that wait for the same work. Pure: no clock, no I/O.

A flow is what shares its turns: the jobs of one tenant, or of one API key. A lane is a flow within a class.

Between classes: a higher one goes first, unless a lower one that waits has been passed over `MAX_PASSED`
times in a row. Then it is the turn of the one that was passed over most often. So with n classes a class that
waits gets one turn in `MAX_PASSED` + n - 1 at least.

Between the flows of a class: start-time fair queueing (Goyal, Vin and Cheng, 1996). The class has a clock
that shows the start of its latest turn. A flow's turn starts when its last one ended, or now by that clock if
that is later; it ends as much later as its work costs. The earliest start goes first. The shares of two
waiting flows differ by at most one turn's cost of each, however much one of them asks for; a new flow waits
for at most one turn of each other flow, and an idle flow saves nothing up.
"""

from collections.abc import Collection
from typing import NamedTuple

from triptych_common.protocol.messages import EncodeClass, ImageProperties, Modality

MAX_PASSED = 8
LEVELS: dict[EncodeClass, int] = {each: level for level, each in enumerate(EncodeClass)}
MAX_WAIT_TURNS = MAX_PASSED + len(LEVELS) - 1
"""Longest wait of a class for its turn, in turns."""
_KEPT_FLOWS = 256  # ends of idle flows are forgotten beyond that many


MIN_COST = 0.25  # cost of the smallest image: each item is some work
COSTS = {Modality.IMAGE: 1.0, Modality.AUDIO: 1.0, Modality.VIDEO: 16.0}  # for items whose header has no size


def turn_cost(modality: Modality, image: ImageProperties | None) -> float:
    """Return the cost of an item's encode in megapixels, with which encode time grows."""
    return COSTS[modality] if image is None else max(image.num_pixels / 1e6, MIN_COST)


class Lane(NamedTuple):
    """A flow within a class: the unit that waits for turns."""

    encode_class: EncodeClass = EncodeClass.INTERACTIVE
    flow: str = ""


DEFAULT_LANE = Lane()


class FairTurns:
    """Record of which lanes had turns. The caller owns the queues and passes what waits."""

    def __init__(self) -> None:
        self._clocks = dict.fromkeys(EncodeClass, 0.0)
        self._passed = dict.fromkeys(EncodeClass, 0)
        self._ends: dict[Lane, float] = {}  # by its class's clock

    def copy(self) -> "FairTurns":
        """Return a copy, to simulate later turns."""
        other = FairTurns()
        other._clocks, other._passed = dict(self._clocks), dict(self._passed)
        other._ends = dict(self._ends)
        return other

    def next_lane(self, waiting: Collection[Lane]) -> Lane:
        """Return the lane of the non-empty `waiting` whose turn is next; the first of equals."""
        classes = {lane.encode_class for lane in waiting}
        chosen = min(classes, key=LEVELS.__getitem__)
        overdue = [each for each in classes if self._passed[each] >= MAX_PASSED]
        if overdue:
            chosen = min(overdue, key=lambda each: (-self._passed[each], LEVELS[each]))
        return min((lane for lane in waiting if lane.encode_class is chosen), key=self.start_of)

    def take_turn(self, lane: Lane, cost: float, waiting: Collection[Lane]) -> None:
        """Give `lane` a turn; `waiting` are all lanes that waited for it.

        Lanes without room count too: they are passed over all the same.
        """
        start = self.start_of(lane)
        self._clocks[lane.encode_class] = max(self._clocks[lane.encode_class], start)
        self._ends[lane] = start + cost
        classes = {each.encode_class for each in waiting} - {lane.encode_class}
        for each in self._passed:
            self._passed[each] = self._passed[each] + 1 if each in classes else 0
        if len(self._ends) > _KEPT_FLOWS + len(waiting):
            self._ends = {
                each: end for each, end in self._ends.items() if end > self._clocks[each.encode_class]
            }

    def start_of(self, lane: Lane) -> float:
        """Return when the lane's next turn starts, on its class's clock."""
        return max(self._clocks[lane.encode_class], self._ends.get(lane, 0.0))
