"""Gate policy: order and batches of prepared items that go into vLLM. Pure: no clock, no I/O.

Classes and flows share a fair queue (common `domain.fair_queue`): a flow that has much in hand does not hold
back the others. Within a flow every item has a time at which it is due, and the one that is due first goes
first:

    the first item of a request that is in hand    when its request came
    the others of that request                     `FIRST_LEAD_S` later
    an item that several requests wait for         `JOIN_LEAD_S` earlier for each of the others
    an item whose deadline is near                 `DEADLINE_LEAD_S` before the deadline, if that is earlier

So a request's items go in the order of its prompt, older requests go first, and a request with many items
does not hold back the first item of another. All leads are bounded: what came long after an item is due does
not overtake it, so nothing starves (earliest due date first, as in real-time scheduling). An idle engine
gets what is ready: an item that is still being preprocessed holds back none. Behind a batch that is computed
only the item that is due first goes: until the batch is done there is time to prepare it. One that an idle
engine has passed over has had that time, and holds back none any more, nor splits what could be a batch.

vLLM gets two batches at most: it computes one, and has the next when that is done. What it has is not
recalled, so the next one goes there as late as possible: `LEAD_S` before the first is predicted to end, or,
while several flows have items, and encodes are long and one by one, at that end, which no prediction
misses. An item that comes meanwhile and whose turn is earlier does not wait for it. Items are gathered up to
the size of a batch and, on a CPU, up to `LONG_ENCODE_S` of work: the fixed cost of a step, there and at the
language model, which then gets several items at once, is shared. A first item goes alone into an idle engine
when what would go with it are later items of requests, so that it is sealed before them.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from triptych_common.domain.fair_queue import DEFAULT_KEY, FairKey, FairQueue
from triptych_common.protocol.messages import RequesterKey

FIRST_LEAD_S = 2.0
JOIN_LEAD_S = 0.25
MAX_JOIN_LEAD_S = 1.0
DEADLINE_LEAD_S = 2.0
MAX_OVERTAKE_S = FIRST_LEAD_S + MAX_JOIN_LEAD_S + DEADLINE_LEAD_S
"""An item is never overtaken by one of its flow and class that came this much later than its request."""
MAX_BATCHES = 2  # in vLLM: one is computed, one waits
LEAD_S = 0.015  # from the gate to vLLM's next step, and some more
LEAD_SHARE = 0.1  # of what the batch before is predicted to take, since predictions err
FLOW_MEMORY_S = 5.0  # a flow whose latest item came so long ago is about to have another
MAX_FLOWS = 256  # flows that are remembered
LONG_ENCODE_S = 0.1  # one for which the pause between two, some 10 ms without `LEAD_S`, is a small price


@dataclass(eq=False, slots=True)
class GateItem:
    """One item in hand, with times in monotonic seconds."""

    places: frozenset[RequesterKey]  # who waits for it, as far as it is known
    published_at: float
    deadline: float
    key: FairKey = DEFAULT_KEY  # of the fair queue
    cost: float = 1.0  # of its slot
    seconds: float = 0.0  # predicted seconds of vLLM; 0: unknown
    num_rows: int = 0  # of its encoder output, once it is prepared


class GatePolicy:
    """Owns the items in hand: being prepared, ready, or in vLLM."""

    def __init__(self, encode_batch: int, longest_batch_s: float = math.inf) -> None:
        """
        Args:
            encode_batch: most items that vLLM computes at once.
            longest_batch_s: seconds that the items of a batch may take together, as predicted. If it is
                finite, an item goes alone whose time is longer, or not known.
        """
        self._encode_batch = encode_batch
        self._longest_batch_s = longest_batch_s
        self._goes_one_by_one = encode_batch == 1 or longest_batch_s <= LONG_ENCODE_S  # what is long
        self._fair_queue = FairQueue()
        self._in_hand: dict[GateItem, None] = {}  # in the order of arrival, which decides between equals
        self._ready: set[GateItem] = set()
        self._passed: set[GateItem] = set()  # unprepared items that an idle engine has passed over
        self._batches: list[set[GateItem]] = []  # in vLLM, in the order in which they went there
        self._since: dict[str, float] = {}  # by request, while an item of it is in hand
        self._begun: set[str] = set()  # requests of which an item went first
        self._computed: set[GateItem] = set()  # the batch that vLLM computes
        self._next_batch_at = 0.0  # the next one
        self._is_long = False  # whether its predicted time is long
        self._came_at: dict[str, float] = {}  # by flow: its latest item
        self.held_until: float | None = None
        """Time set by the last `take_batch` at which it must be asked again, if nothing happens before."""

    @property
    def num_in_engine(self) -> int:
        return sum(map(len, self._batches))

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def add_item(self, item: GateItem) -> None:
        """Add an item that is in hand and not yet prepared."""
        self._in_hand[item] = None
        flow = item.key.flow
        self._came_at[flow] = max(item.published_at, self._came_at.pop(flow, item.published_at))
        if len(self._came_at) > MAX_FLOWS:
            del self._came_at[next(iter(self._came_at))]
        for request_id in _requests(item):
            self._since[request_id] = min(self._since.get(request_id, item.published_at), item.published_at)

    def set_places(self, item: GateItem, places: Iterable[RequesterKey]) -> None:
        item.places = frozenset(places)
        for request_id in _requests(item):
            self._since.setdefault(request_id, item.published_at)

    def set_ready(self, item: GateItem) -> None:
        """Mark the item as prepared, so that it may go into vLLM."""
        self._ready.add(item)
        self._passed.discard(item)

    def remove_item(self, item: GateItem) -> None:
        """Remove an item that vLLM has finished, or that never goes there. Idempotent."""
        self._in_hand.pop(item, None)
        self._ready.discard(item)
        self._passed.discard(item)
        for batch in self._batches:
            batch.discard(item)
        self._batches = [batch for batch in self._batches if batch]
        left = Counter(request_id for each in self._in_hand for request_id in _requests(each))
        for request_id in self._since.keys() - left.keys():
            del self._since[request_id]
            self._begun.discard(request_id)

    def take_batch(self, now: float = float("inf")) -> list[GateItem]:
        """Items to give to vLLM now; none if it has enough, or nothing is ready.

        `now` is in monotonic seconds; by default nothing is held back.
        """
        self.held_until = None
        self._note_computed(now)
        # The last of two batches has not begun: more may go with it.
        open_batch = self._batches[-1] if len(self._batches) >= MAX_BATCHES else set()
        waiting = self._in_order()
        if self._batches:  # vLLM is busy meanwhile: nothing goes before what is about to be ready
            going = list(takewhile(lambda item: item in self._ready or item in self._passed, waiting))
        else:
            going = waiting
        chosen = self._fitting(open_batch, (item for item in going if item in self._ready))
        if not chosen:
            return []
        if self._batches and self._goes_one_by_one and self._is_long and self._has_flows(now):
            return []  # until the end of the batch
        if self._batches and now < self._next_batch_at:
            self.held_until = self._next_batch_at
            return []
        if not self._batches and self._is_first(chosen[0]) and not all(map(self._is_first, chosen)):
            del chosen[1:]
        if not self._batches:
            before = takewhile(lambda item: item is not chosen[-1], waiting)
            self._passed.update(item for item in before if item not in self._ready)
        keys = {item.key for item in waiting}
        for item in chosen:
            self._fair_queue.take_slot(item.key, item.cost, keys)
            self._ready.discard(item)
            self._begun |= {request_id for request_id, index in item.places if self._leads(request_id, index)}
        if len(self._batches) < MAX_BATCHES:
            self._batches.append(set(chosen))
        else:
            self._batches[-1].update(chosen)
        self._note_computed(now)
        return chosen

    def _fitting(self, batch: Iterable[GateItem], ready: Iterable[GateItem]) -> list[GateItem]:
        """Return the items of `ready`, in its order, that may be computed together with those of `batch`."""
        batch, chosen = list(batch), list[GateItem]()
        for item in ready:
            together = [*batch, *chosen, item]
            seconds = math.fsum(each.seconds or math.inf for each in together)
            if len(together) > self._encode_batch or (len(together) > 1 and seconds > self._longest_batch_s):
                break
            chosen.append(item)
        return chosen

    def batch_of(self, item: GateItem) -> frozenset[GateItem]:
        """Unfinished items of the batch of `item`, itself included."""
        return frozenset().union(*(batch for batch in self._batches if item in batch))

    def _note_computed(self, now: float) -> None:
        """Schedule the hand-over of the next batch if vLLM has begun another since the last call."""
        if not self._batches or self._batches[0] is self._computed:
            return
        self._computed = self._batches[0]
        known = [each.seconds for each in self._computed]
        seconds = sum(known) if all(known) else 0.0
        self._next_batch_at = now + seconds - max(LEAD_S, LEAD_SHARE * seconds)
        self._is_long = seconds >= LONG_ENCODE_S

    def _has_flows(self, now: float) -> bool:
        """True if several flows have items, or had some recently."""
        recent = {flow for flow, at in self._came_at.items() if now - at < FLOW_MEMORY_S}
        return len(recent | {item.key.flow for item in self._in_hand}) > 1

    def is_next(self, item: GateItem) -> bool:
        """Return whether `item` is due first of all that is not in vLLM yet, prepared or not."""
        waiting = self._in_order()
        return bool(waiting) and waiting[0] is item

    def _in_order(self) -> list[GateItem]:
        """Return the items that are not in vLLM yet, in the order in which they go once prepared."""
        keys: dict[FairKey, list[GateItem]] = {}
        for item in sorted((each for each in self._in_hand if not self._is_in_engine(each)), key=self._rank):
            keys.setdefault(item.key, []).append(item)
        if len(keys) <= 1:
            return [item for items in keys.values() for item in items]
        fair_queue, ordered = self._fair_queue.copy(), []
        while keys:
            key = fair_queue.next_key(keys)
            item = keys[key].pop(0)
            fair_queue.take_slot(key, item.cost, keys)
            ordered.append(item)
            if not keys[key]:
                del keys[key]
        return ordered

    def _rank(self, item: GateItem) -> tuple[float, int]:
        return self.due_at(item), min((index for _, index in item.places), default=0)

    def due_at(self, item: GateItem) -> float:
        """Time at which the item is due, in monotonic seconds."""
        due = [
            self._since[request_id] + (0.0 if self._leads(request_id, index) else FIRST_LEAD_S)
            for request_id, index in item.places
        ]
        earliest = min(due, default=item.published_at + FIRST_LEAD_S)
        num_others = max(len(set(_requests(item))) - 1, 0)
        return min(earliest - min(num_others * JOIN_LEAD_S, MAX_JOIN_LEAD_S), item.deadline - DEADLINE_LEAD_S)

    def _is_first(self, item: GateItem) -> bool:
        return any(self._leads(request_id, index) for request_id, index in item.places)

    def _leads(self, request_id: str, index: int) -> bool:
        """True if no item of the request went before and none in hand precedes this one in its prompt."""
        return request_id not in self._begun and not any(
            request_id == other and before < index
            for each in self._in_hand
            if not self._is_in_engine(each)
            for other, before in each.places
        )

    def _is_in_engine(self, item: GateItem) -> bool:
        return any(item in batch for batch in self._batches)


def _requests(item: GateItem) -> Iterable[str]:
    return (request_id for request_id, _ in item.places)
