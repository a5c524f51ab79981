"""InstanceLoad: this gateway's work before each instance; LocalRoom: requests that wait here for room there.

A piece of work is what one request needs of its instance until its first token. It is due at once, or when
encoders will have made its items; an instance takes due work one after the other.

An instance serves requests in the order of their arrival. So the gateway sends it at most `NUM_PLACES` such
requests before their first tokens: a text that arrives meanwhile waits for no more than these. The others
wait here, in fair turns of classes and flows (`domain.fair_queue`). For one event loop.
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import count

from triptych_common.domain.fair_queue import FairKey, FairQueue
from triptych_gateway.errors import EncodeUnavailableError

WorkId = int


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """Work before one instance: (seconds until it is due, seconds that it takes), in order of due time."""

    pieces: tuple[tuple[float, float], ...] = ()

    def busy_s(self, in_s: float = 0.0) -> float:
        """Return how long work that is due in `in_s` waits for earlier work."""
        free_at = 0.0
        for due_s, work_s in self.pieces:
            if due_s > in_s:
                break
            free_at = max(free_at, due_s) + work_s
        return max(0.0, free_at - in_s)

    def delay_s(self, work_s: float) -> float:
        """Return the total delay of all pieces if `work_s` is inserted behind those that are due now."""
        free_at, delayed_until, total_s = 0.0, 0.0, 0.0
        is_in = False
        for due_s, piece_s in self.pieces:
            if not is_in and due_s > 0:
                is_in, delayed_until = True, free_at + work_s
            free_at = max(free_at, due_s) + piece_s
            if is_in:
                delayed_until = max(delayed_until, due_s) + piece_s
                total_s += delayed_until - free_at
        return total_s

    @property
    def num_due(self) -> int:
        """Number of requests that wait for the instance now or are served."""
        return sum(due_s <= 0 for due_s, _ in self.pieces)


@dataclass(slots=True)
class _Instance:
    works: dict[WorkId, tuple[float, float]] = field(default_factory=dict)  # (due at, seconds)
    ended_at: float = float("-inf")  # the last first token
    total_s: float = 0.0  # of all work that ever began


class InstanceLoad:
    """Work before all instances; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._instances: defaultdict[str, _Instance] = defaultdict(_Instance)
        self._num_streams: Counter[str] = Counter()
        self._num_texts: Counter[str] = Counter()
        self._ids = count()

    def work_ahead(self, instance: str, now: float) -> WorkAhead:
        known = self._instances.get(instance)
        if known is None:
            return WorkAhead()
        works = sorted(known.works.values())
        pieces = [(max(0.0, due_at - now), work_s) for due_at, work_s in works]
        if works and works[0][0] <= now:  # the first of them is under way
            began_at = max(works[0][0], known.ended_at)
            pieces[0] = (0.0, max(0.0, works[0][1] - (now - began_at)))
        return WorkAhead(tuple(pieces))

    def num_streams(self, instance: str) -> int:
        """Return the number of answers under way, token by token."""
        return self._num_streams[instance]

    def num_texts(self, instance: str) -> int:
        """Requests that need no encode, from when they are sent to the end of their answers."""
        return self._num_texts[instance]

    def is_idle(self, instance: str) -> bool:
        known = self._instances.get(instance)
        return (known is None or not known.works) and not self._num_streams[instance]

    def total_work_s(self, instance: str) -> float:
        """Return all work ever put before the instance; a difference of two calls is the work between."""
        known = self._instances.get(instance)
        return 0.0 if known is None else known.total_s

    def begin_work(self, instance: str, due_at: float, work_s: float) -> WorkId:
        """Record a request that was sent. `end_work` must follow."""
        known, work_id = self._instances[instance], next(self._ids)
        known.works[work_id] = (due_at, work_s)
        known.total_s += work_s
        return work_id

    def end_work(self, instance: str, work_id: WorkId, now: float) -> None:
        """Record the first token of the work, or its end without one."""
        known = self._instances[instance]
        known.works.pop(work_id, None)
        known.ended_at = now

    def begin_stream(self, instance: str) -> None:
        self._num_streams[instance] += 1

    def end_stream(self, instance: str) -> None:
        _count_down(self._num_streams, instance)

    def begin_text(self, instance: str) -> None:
        """A request that needs no encode was sent. `end_text` must follow."""
        self._num_texts[instance] += 1

    def end_text(self, instance: str) -> None:
        _count_down(self._num_texts, instance)

    def forget_all_but(self, alive: set[str]) -> None:
        """Drop facts about instances that left the registry, once nothing of theirs runs."""
        for instance in self._instances.keys() - alive:
            if not self._instances[instance].works:
                del self._instances[instance]


def _count_down(counts: Counter[str], instance: str) -> None:
    """Take one off the count of `instance`, and forget the instance at 0."""
    counts[instance] -= 1
    if counts[instance] <= 0:
        del counts[instance]


NUM_PLACES = 24
"""Requests at one instance: two steps of small images, so the next is there when the first is done."""


@dataclass(slots=True)
class _Room:
    num_places: int = 0  # taken
    held: dict[FairKey, deque[asyncio.Future[None]]] = field(default_factory=dict)
    turns: FairQueue = field(default_factory=FairQueue)

    @property
    def is_unused(self) -> bool:
        """True if no request waits here or has a place."""
        return not self.num_places and not self.held

    def let_in(self) -> None:
        """Give free places to waiting requests."""
        while self.num_places < NUM_PLACES and self.held:
            fair_key = self.turns.next_key(self.held)
            turn = self.held[fair_key][0]
            if not turn.done():  # otherwise its request is ending
                self.turns.take_slot(fair_key, 1.0, self.held)
                self.num_places += 1
                turn.set_result(None)
            self.withdraw(fair_key, turn)

    def withdraw(self, fair_key: FairKey, turn: asyncio.Future[None]) -> None:
        """Remove a request that waits no more, if it still stands here."""
        waiting = self.held.get(fair_key, deque())
        if turn in waiting:
            waiting.remove(turn)
        if not waiting:
            self.held.pop(fair_key, None)


class LocalPlace:
    """Place at one instance, held from the decision to the first token or the end of the request.

    A whole answer does not show its first token: its place ends when that was predicted (`EncodeDecisions`).
    """

    def __init__(self, instance: _Room) -> None:
        self._instance: _Room | None = instance

    def leave(self) -> None:
        """Give the place back; later calls have no effect."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.num_places -= 1
            instance.let_in()


class LocalRoom:
    """Places at all instances; a gateway has one of these."""

    def __init__(self) -> None:
        self._instances: defaultdict[str, _Room] = defaultdict(_Room)

    def num_held(self, instance: str) -> int:
        return sum(map(len, self._instances[instance].held.values())) if instance in self._instances else 0

    def num_requests(self, instance: str) -> int:
        known = self._instances.get(instance)
        return 0 if known is None else self.num_held(instance) + known.num_places

    def is_full(self, instance: str) -> bool:
        """Return whether the next request must wait."""
        return self.num_requests(instance) >= NUM_PLACES

    async def take_place(self, instance: str, fair_key: FairKey, deadline: float) -> LocalPlace:
        """Wait for the turn of `fair_key`; the place ends at the latest with the task that took it.

        Args:
            instance: instance that will encode.
            fair_key: class and flow of the request.
            deadline: monotonic seconds.

        Raises:
            EncodeUnavailableError: the deadline has passed.
        """
        if instance not in self._instances:  # names of pods that are gone would add up
            for name in [name for name, each in self._instances.items() if each.is_unused]:
                del self._instances[name]
        known = self._instances[instance]
        turn = asyncio.get_running_loop().create_future()
        known.held.setdefault(fair_key, deque()).append(turn)
        known.let_in()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                LocalPlace(known).leave()  # the turn came together with the end
            turn.cancel()
            known.withdraw(fair_key, turn)
            if isinstance(error, TimeoutError):
                raise EncodeUnavailableError(
                    "deadline_exceeded", "the media could not be encoded in time"
                ) from error
            raise
        place, task = LocalPlace(known), asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: place.leave())
        return place
