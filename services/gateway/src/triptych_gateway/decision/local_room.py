"""LocalRoom: requests that an instance will encode itself, on cores that it shares with encoders.

An instance serves requests in the order of their arrival. So the gateway sends it at most `NUM_PLACES` such
requests before their first tokens: a text that arrives meanwhile waits for no more than these. The others
wait here, in fair turns of classes and flows (`domain.fair_turns`). For one event loop.
"""

import asyncio
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from triptych_common.domain.fair_turns import FairTurns, Lane
from triptych_gateway.errors import EncodeUnavailableError

NUM_PLACES = 24
"""Requests at one instance: two steps of small images, so the next is there when the first is done."""


@dataclass(slots=True)
class _Instance:
    num_places: int = 0  # taken
    held: dict[Lane, deque[asyncio.Future[None]]] = field(default_factory=dict)
    turns: FairTurns = field(default_factory=FairTurns)

    @property
    def is_unused(self) -> bool:
        """True if no request waits here or has a place."""
        return not self.num_places and not self.held

    def let_in(self) -> None:
        """Give free places to waiting requests."""
        while self.num_places < NUM_PLACES and self.held:
            lane = self.turns.next_lane(self.held)
            turn = self.held[lane][0]
            if not turn.done():  # otherwise its request is ending
                self.turns.take_turn(lane, 1.0, self.held)
                self.num_places += 1
                turn.set_result(None)
            self.withdraw(lane, turn)

    def withdraw(self, lane: Lane, turn: asyncio.Future[None]) -> None:
        """Remove a request that waits no more, if it still stands here."""
        waiting = self.held.get(lane, deque())
        if turn in waiting:
            waiting.remove(turn)
        if not waiting:
            self.held.pop(lane, None)


class LocalPlace:
    """Place at one instance, held from the decision to the first token or the end of the request.

    A whole answer does not show its first token: its place ends when that was predicted (`EncodeDecisions`).
    """

    def __init__(self, instance: _Instance) -> None:
        self._instance: _Instance | None = instance

    def leave(self) -> None:
        """Give the place back; later calls have no effect."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.num_places -= 1
            instance.let_in()


class LocalRoom:
    """Places at all instances; a gateway has one of these."""

    def __init__(self) -> None:
        self._instances: defaultdict[str, _Instance] = defaultdict(_Instance)

    def num_held(self, instance: str) -> int:
        """Return the number of requests that wait for a place."""
        return sum(map(len, self._instances[instance].held.values())) if instance in self._instances else 0

    def num_requests(self, instance: str) -> int:
        """Return the number of requests that wait for a place or have one."""
        known = self._instances.get(instance)
        return 0 if known is None else self.num_held(instance) + known.num_places

    def is_full(self, instance: str) -> bool:
        """Return whether the next request must wait."""
        return self.num_requests(instance) >= NUM_PLACES

    async def take_place(self, instance: str, lane: Lane, deadline: float) -> LocalPlace:
        """Wait for the turn of `lane`; the place ends at the latest with the task that took it.

        Args:
            instance: instance that will encode.
            lane: class and flow of the request.
            deadline: monotonic seconds.

        Raises:
            EncodeUnavailableError: the deadline has passed.
        """
        if instance not in self._instances:  # names of pods that are gone would add up
            for name in [name for name, each in self._instances.items() if each.is_unused]:
                del self._instances[name]
        known = self._instances[instance]
        turn = asyncio.get_running_loop().create_future()
        known.held.setdefault(lane, deque()).append(turn)
        known.let_in()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                LocalPlace(known).leave()  # the turn came together with the end
            turn.cancel()
            known.withdraw(lane, turn)
            if isinstance(error, TimeoutError):
                raise EncodeUnavailableError(
                    "deadline_exceeded", "the media could not be encoded in time"
                ) from error
            raise
        place, task = LocalPlace(known), asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: place.leave())
        return place
