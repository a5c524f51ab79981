"""`bus.SingleFlight` of one process: Redis runs its scripts one by one, when the world decides so.

Those for one item keep their order; others have connections of their own. The answer comes with the
script: what happens between the two looks to the others as if it had happened before, or after.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from tests.support.flight_model import FlightModel
from tests.support.protocol_world.network import Network
from tests.support.protocol_world.virtual_loop import VirtualLoop
from triptych_common.coordination import JobOffer


@dataclass
class Script:
    """One on its way. `reply` is open until Redis has run it."""

    name: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    reply: "asyncio.Future[Any]" = field(repr=False)


class FlightLink:
    """Same methods as `bus.SingleFlight`, and the acks of jobs."""

    def __init__(self, network: Network, loop: VirtualLoop) -> None:
        self._network = network
        self._loop = loop
        self.scripts: dict[str, deque[Script]] = {}  # by mm_hash

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        if not hasattr(FlightModel, name):
            raise AttributeError(name)

        async def call(about: str | BaseModel | JobOffer, *arguments: Any, **options: Any) -> Any:
            about_job = about.job if isinstance(about, JobOffer) else about
            mm_hash = about_job if isinstance(about_job, str) else about_job.mm_hash  # type: ignore[attr-defined]
            return await self._send(mm_hash, name, (about, *map(_as_it_is_now, arguments)), options)

        return call

    async def ack(self, mm_hash: str, number: int) -> None:
        """The job is done."""
        await self._send(mm_hash, "ack", (str(number),), {})

    async def _send(
        self, mm_hash: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        reply = self._loop.create_future()
        self.scripts.setdefault(mm_hash, deque()).append(Script(name, arguments, options, reply))
        return await reply

    def run_next(self, mm_hash: str) -> str:
        """Run the next script for the item, and give its caller the answer. Returns what it came to."""
        script = self.scripts[mm_hash].popleft()
        if not self.scripts[mm_hash]:
            del self.scripts[mm_hash]
        if script.name == "ack":
            self._network.remove(script.arguments[0])
            answer: Any = None
        else:
            answer = _at_once(
                getattr(self._network.flights, script.name)(*script.arguments, **script.options)
            )

        def reply() -> None:
            if not script.reply.done():  # else its caller waits no more
                script.reply.set_result(answer)

        self._loop.run(reply)
        return _outcome(script, answer)


def _as_it_is_now(argument: Any) -> Any:
    if isinstance(argument, Set | Mapping):
        return tuple(sorted(argument))
    if isinstance(argument, Iterable) and not isinstance(argument, str | BaseModel):
        return tuple(argument)
    return argument


def _at_once(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a script waits")


def _outcome(script: Script, answer: Any) -> str:
    match script.name:
        case "claim_flight":
            published = ", published" if answer.entry_id else ""
            return f"{'check' if script.options['mode'] == 'check' else 'claim'}, {answer.result}{published}"
        case "start_job":
            return f"start, {answer[0]}"
        case "leave_flight":
            return "leave, dropped" if answer else "leave"
        case "publish_job":
            return "publish" if answer is not None else "publish, gone"
        case "finish_flight":
            return "finish" if answer[0] else "finish, joined"
    return script.name
