"""LocalRoom: the requests that an instance is about to encode itself, on the cores of the encoders.

An instance takes requests in the order in which they come, so of those that it encodes only `NUM_PLACES` are
with it before their first tokens: a text that comes meanwhile waits for no more. The others wait here, and
classes and flows take turns (`domain.fair_turns`). For one event loop.
"""

import asyncio
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field

from triptych_common.domain.fair_turns import FairTurns, Lane
from triptych_gateway.errors import EncodeUnavailableError

NUM_PLACES = 24
"""Two steps of small images: the engine computes one, and has the next when that is done."""


@dataclass(slots=True)
class _Instance:
    num_places: int = 0  # taken
    held: dict[Lane, deque[asyncio.Future[None]]] = field(default_factory=dict)
    turns: FairTurns = field(default_factory=FairTurns)

    def let_in(self) -> None:
        """Give the places that are free to those that wait."""
        while self.num_places < NUM_PLACES and self.held:
            lane = self.turns.next_lane(self.held)
            self.turns.take_turn(lane, 1.0, self.held)
            turn = self.held[lane].popleft()
            if not self.held[lane]:
                del self.held[lane]
            if not turn.done():  # else its request has gone away
                self.num_places += 1
                turn.set_result(None)


class LocalPlace:
    """A place at one instance, from the decision to the first token, or to the end of the request."""

    def __init__(self, instance: _Instance) -> None:
        self._instance: _Instance | None = instance

    def leave(self) -> None:
        """Idempotent."""
        instance, self._instance = self._instance, None
        if instance is not None:
            instance.num_places -= 1
            instance.let_in()


class LocalRoom:
    """One per gateway."""

    def __init__(self) -> None:
        self._instances: defaultdict[str, _Instance] = defaultdict(_Instance)

    def num_held(self, instance: str) -> int:
        """Requests that wait for a place."""
        return sum(map(len, self._instances[instance].held.values())) if instance in self._instances else 0

    def num_requests(self, instance: str) -> int:
        """Those, and the ones that have a place."""
        return self.num_held(instance) + self._instances[instance].num_places

    def is_full(self, instance: str) -> bool:
        """Whether the next request has to wait."""
        return self.num_requests(instance) >= NUM_PLACES

    async def take_place(self, instance: str, lane: Lane, deadline: float) -> LocalPlace:
        """Wait for the turn of `lane`. The place ends with the task that took it, if it was not left before.

        `deadline`: monotonic seconds.

        Raises:
            EncodeUnavailableError: it has passed.
        """
        known = self._instances[instance]
        turn = asyncio.get_running_loop().create_future()
        known.held.setdefault(lane, deque()).append(turn)
        known.let_in()
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                LocalPlace(known).leave()  # it came at the same time
            turn.cancel()
            if isinstance(error, TimeoutError):
                raise EncodeUnavailableError(
                    "deadline_exceeded", "the media could not be encoded in time"
                ) from error
            raise
        place, task = LocalPlace(known), asyncio.current_task()
        if task is not None:
            task.add_done_callback(lambda _: place.leave())
        return place
