"""ItemQueue: items with a step due, each listed once and stepped by one task at a time."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from triptych_common.domain.fair_queue import DEFAULT_KEY, LEVELS, MAX_PASSED, FairKey, FairQueue
from triptych_common.protocol.ids import MmHash
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.job_window import JobWindow

log = get_logger(__name__)

MAX_NAMESPACES = 64  # whose turns are remembered
FIRST_LEAD_S = 2.0
"""The first order of a request goes before others of its fair key whose deadlines are earlier by less."""


@dataclass(frozen=True, slots=True)
class OrderPlace:
    namespace_digest: str = ""
    fair_key: FairKey = DEFAULT_KEY
    deadline: float = 0.0  # monotonic seconds
    since: float = 0.0  # monotonic seconds; when it was ordered
    cost: float = 1.0  # of its turn
    index: int = 0  # in its request's prompt


@dataclass(frozen=True, slots=True)
class OrdersAhead:
    """Orders that have their turns before those of a request."""

    num_orders: int = 0
    num_requests: int = 0


@dataclass(eq=False, slots=True)
class _Request:
    """New orders of one request, with one fair key and one deadline."""

    place: OrderPlace
    items: OrderedDict[MmHash, OrderPlace] = field(default_factory=OrderedDict)
    is_busy: bool = False  # a step of one of them is under way
    has_begun: bool = False

    @property
    def due_at(self) -> float:
        return self.place.deadline + (FIRST_LEAD_S if self.has_begun else 0.0)

    @property
    def since(self) -> float:
        return next(iter(self.items.values()), self.place).since

    def take_first(self) -> tuple[MmHash, OrderPlace]:
        """Take the first order in the prompt's order; of equals the one that was added first."""
        mm_hash = min(self.items, key=lambda each: self.items[each].index)
        return mm_hash, self.items.pop(mm_hash)


@dataclass(slots=True)
class _Again:
    """Item that was added again while a step of it was under way."""

    is_urgent: bool  # the last time
    request: str | None  # the last that was given
    place: OrderPlace | None  # place of its new order, if it has one


class ItemQueue:
    """Two queues, so that no new order waits for checks: while Redis is away each takes its timeout.

    New orders wait until there is room for their job (`JobWindow`), and take turns (`FairQueue`) in each
    namespace. Those of one request are stepped one after the other, so that its jobs are published in order.
    Within a fair key the request whose deadline is nearest goes first, and every request's first order goes
    `FIRST_LEAD_S` earlier, so that one with many items does not hold back the others.
    """

    def __init__(self, window: JobWindow) -> None:
        self.window = window
        self._requests: OrderedDict[str, _Request] = OrderedDict()  # the next turn comes first
        self._request_of: dict[MmHash, str] = {}  # of new orders, until their step has ended
        # By namespace; the one that had a turn last comes last.
        self._turns: OrderedDict[str, FairQueue] = OrderedDict()
        self._others: OrderedDict[MmHash, None] = OrderedDict()
        self._unchecked: set[MmHash] = set()  # items whose state in Redis may have changed
        self._busy: set[MmHash] = set()  # a step is under way
        self._again: dict[MmHash, _Again] = {}
        self._round: set[MmHash] = set()  # items that the last round of checks has not reached yet
        self._changed = asyncio.Event()
        self._held_back = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(each.items) for each in self._requests.values()) + len(self._others)

    def num_waiting(self) -> Counter[FairKey]:
        """Return the number of new orders by fair key, over all namespaces."""
        counts = Counter[FairKey]()
        for request in self._requests.values():
            if request.items:
                counts[request.place.fair_key] += len(request.items)
        return counts

    def add_item(
        self,
        mm_hash: MmHash,
        *,
        is_urgent: bool,
        check: bool = False,
        request: str | None = None,
        place: OrderPlace | None = None,
    ) -> None:
        """List an item at the end; an item that becomes urgent moves up, none moves down.

        `is_urgent` marks a new order. `request` is the request whose other orders it must not overtake, if
        any.
        """
        if check:
            self._unchecked.add(mm_hash)
        if mm_hash in self._busy:
            known = self._again.get(mm_hash, _Again(is_urgent, None, None))
            self._again[mm_hash] = _Again(is_urgent, request or known.request, place or known.place)
            return
        if mm_hash in self._request_of:
            return
        if is_urgent:
            self._others.pop(mm_hash, None)
            self._round.discard(mm_hash)  # it may wait for room
            name = request or mm_hash
            place = place or OrderPlace()
            self._request_of[mm_hash] = name
            self._requests.setdefault(name, _Request(place)).items[mm_hash] = place
        else:
            self._others.setdefault(mm_hash)
        self._changed.set()

    def withdraw_item(self, mm_hash: MmHash) -> bool:
        """Withdraw the new order of an item that needs no job; return False if none waits.

        Other work of its step is still due.
        """
        name = self._request_of.get(mm_hash)
        if name is None or mm_hash in self._busy:
            return False
        del self._request_of[mm_hash]
        del self._requests[name].items[mm_hash]
        self._drop_if_empty(name)
        return True

    def begin_round(self, mm_hashes: Iterable[MmHash]) -> None:
        """Begin a round of checks of these items, without new orders that wait for room."""
        self._round = {each for each in mm_hashes if each not in self._request_of}

    @property
    def has_round(self) -> bool:
        """True while items of the last round wait for their check: Redis is slow, or away."""
        return bool(self._round)

    async def run_steps(self, step: Callable[..., Awaitable[None]]) -> None:
        """Take items and `step` each, for ever."""
        while True:
            mm_hash, is_check = await self.take_item()
            try:
                await step(mm_hash, is_check=is_check)
            except Exception:  # one bad item must not stop the others; the next check tries again
                log.exception("encode order step failed", mm_hash=mm_hash)
            finally:
                self.finish_item(mm_hash)

    async def take_item(self) -> tuple[MmHash, bool]:
        """Return the first item whose turn it is, and whether to check it. `finish_item` must follow.

        The job of a new order counts in the window from now on.
        """
        while (mm_hash := self._next()) is None:
            self._changed.clear()
            await self._changed.wait()
        self._busy.add(mm_hash)
        is_check = mm_hash in self._unchecked
        self._unchecked.discard(mm_hash)
        return mm_hash, is_check

    def _next(self) -> MmHash | None:
        waiting: dict[str, dict[FairKey, str]] = {}  # by namespace: the first request of each fair key
        self._held_back.clear()
        for name, request in self._requests.items():
            if request.is_busy or not request.items:
                continue
            fair_keys = waiting.setdefault(request.place.namespace_digest, {})
            first = fair_keys.get(request.place.fair_key)
            if first is None or request.due_at < self._requests[first].due_at:
                fair_keys[request.place.fair_key] = name
        for digest in sorted(waiting, key=self._namespace_order):
            fair_keys = {
                fair_key: name
                for fair_key, name in waiting[digest].items()
                if self.window.has_room(digest, fair_key.flow)
            }
            if len(fair_keys) < len(waiting[digest]):
                self._held_back.set()
            if fair_keys:
                turns = self._turns.setdefault(digest, FairQueue())
                fair_key = turns.next_key(fair_keys)  # those without room were passed over, too
                return self._take_order(digest, fair_keys[fair_key], turns, waiting[digest])
        return self._others.popitem(last=False)[0] if self._others else None

    def _namespace_order(self, digest: str) -> int:
        return next((at for at, each in enumerate(self._turns) if each == digest), -1)

    def _take_order(self, digest: str, name: str, turns: FairQueue, fair_keys: dict[FairKey, str]) -> MmHash:
        request = self._requests[name]
        mm_hash, place = request.take_first()
        turns.take_slot(request.place.fair_key, place.cost, fair_keys)
        request.is_busy = request.has_begun = True
        self._requests.move_to_end(name)
        self._turns.move_to_end(digest)
        if len(self._turns) > MAX_NAMESPACES:
            self._turns.popitem(last=False)
        self.window.begin_job(mm_hash, digest, request.place.fair_key.flow)
        return mm_hash

    def finish_item(self, mm_hash: MmHash) -> None:
        """End an item's step; if it was added meanwhile it is next."""
        is_published = self.window.end_unpublished(mm_hash)
        self._busy.discard(mm_hash)
        name, own_place = self._request_of.pop(mm_hash, None), None
        if name is not None:
            request = self._requests[name]
            request.is_busy, own_place = False, request.place
            self._drop_if_empty(name)
        again = self._again.pop(mm_hash, None)
        if again is None:
            self._round.discard(mm_hash)
        elif again.is_urgent and not is_published:
            self._add_again(mm_hash, again, name, own_place)
        else:
            self._others[mm_hash] = None
            self._others.move_to_end(mm_hash, last=False)
        self._changed.set()

    def _add_again(
        self, mm_hash: MmHash, again: _Again, name: str | None, own_place: OrderPlace | None
    ) -> None:
        """Add a new order, which is its request's next one unless it now belongs to another request."""
        place, request = again.place or own_place, again.request
        if (
            request is None
            and place is not None
            and own_place is not None
            and place.fair_key == own_place.fair_key
        ):
            request = name
        self.add_item(mm_hash, is_urgent=True, request=request, place=place)
        if request is None or request == name:  # else not before its request's other orders
            self._make_next(mm_hash)

    def _drop_if_empty(self, name: str) -> None:
        if not self._requests[name].items and not self._requests[name].is_busy:
            del self._requests[name]

    def _make_next(self, mm_hash: MmHash) -> None:
        name = self._request_of[mm_hash]
        self._requests[name].items.move_to_end(mm_hash, last=False)
        self._requests.move_to_end(name, last=False)

    # ---- room ------------------------------------------------------------------------------------
    def end_job(self, mm_hash: MmHash) -> None:
        if self.window.end_job(mm_hash, is_followed=self._held_back.is_set()):
            self._changed.set()

    def note_stream(self, namespace_digest: str, num_jobs: int) -> None:
        self.window.note_stream(namespace_digest, num_jobs)
        self._changed.set()

    async def wait_held_back(self) -> set[str]:
        """Wait until orders wait for room, and return their namespaces."""
        self.window.forget_streams()
        await self._held_back.wait()
        return {each.place.namespace_digest for each in self._requests.values()}

    def oldest_since(self, namespace_digest: str, fair_key: FairKey) -> float | None:
        """Return when the oldest waiting order of the fair key was ordered, or None."""
        since = (each.since for each in self._of(namespace_digest) if each.place.fair_key == fair_key)
        return min(since, default=None)

    def oldest_of_all(self) -> float | None:
        """Return when the oldest waiting order was ordered, or None."""
        return min((each.since for each in self._requests.values() if each.items), default=None)

    def _of(self, namespace_digest: str) -> list[_Request]:
        requests = self._requests.values()
        return [each for each in requests if each.items and each.place.namespace_digest == namespace_digest]

    # ---- turns to come ---------------------------------------------------------------------------
    def place_held(self, mm_hash: MmHash) -> tuple[str, OrderPlace] | None:
        """Return request and place of the item's new order until its step has ended, or None."""
        name = self._request_of.get(mm_hash)
        if name is None:
            return None
        request = self._requests[name]
        return name, request.items.get(mm_hash, request.place)

    def key_held(self, mm_hash: MmHash) -> FairKey | None:
        """Return the fair key of the item's new order, or None."""
        name = self._request_of.get(mm_hash)
        return None if name is None else self._requests[name].place.fair_key

    def start_of(self, mm_hash: MmHash, request: str, place: OrderPlace) -> float:
        """Return when an order at this place would start, on its class's clock, after earlier ones."""
        digest, fair_key = place.namespace_digest, place.fair_key
        known = self._requests.get(request)
        due_at = place.deadline + (FIRST_LEAD_S if known is not None and known.has_begun else 0.0)
        turns = self._turns.get(digest)
        return (0.0 if turns is None else turns.start_of(fair_key)) + sum(
            order.cost
            for each in self._of(digest)
            if each.place.fair_key == fair_key and each.due_at <= due_at
            for other, order in each.items.items()
            if other != mm_hash and (each is not known or order.index < place.index)
        )

    def orders_ahead(
        self, namespace_digest: str, fair_key: FairKey, deadline: float, num_orders: int
    ) -> OrdersAhead:
        """Return the orders that go before the last of `num_orders` of a request that arrives now.

        The orders of its fair key that are due earlier. Each other flow of its class has as many slots as
        these and its own together; a higher class `MAX_PASSED` times as many at most. Slots of lower classes
        in between are left out.
        """
        held: dict[FairKey, list[int]] = {}  # orders of each request
        num_before, num_requests = 0, 0
        due_at = deadline + (FIRST_LEAD_S if num_orders > 1 else 0.0)
        for each in self._of(namespace_digest):
            if each.place.fair_key != fair_key:
                held.setdefault(each.place.fair_key, []).append(len(each.items))
            elif each.due_at <= due_at:
                num_before += len(each.items)
                num_requests += 1
        num_turns, level = num_before + max(num_orders, 1), LEVELS[fair_key.encode_class]
        higher = [num for each, nums in held.items() if LEVELS[each.encode_class] < level for num in nums]
        equal = [nums for each, nums in held.items() if LEVELS[each.encode_class] == level]
        num_before += sum(min(sum(nums), num_turns) for nums in equal) + min(
            sum(higher), MAX_PASSED * num_turns
        )
        num_requests += sum(min(len(nums), num_turns) for nums in equal) + min(
            len(higher), MAX_PASSED * num_turns
        )
        return OrdersAhead(num_before, num_requests)
