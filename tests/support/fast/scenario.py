"""One fault at one step of the protocol, under questions of every kind; and what must hold afterwards."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from tests.support.fast.case import Case, CaseError, check
from tests.support.fast.client import Answer, Client, HungError, Question
from tests.support.fast.faults import REDIS, Faults
from tests.support.fast.processes.points import HANDLED, RECEIVED, SENDING
from tests.support.fast.processes.tensors import png
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import FABRIC_STEPS, STAGE_STEPS, STEPS, Channel, Occurs, Party, Step

CLIENT_LIMIT_S = 40.0  # far above any deadline: a request that takes longer hangs
HANG_S = 1.5  # three times the lease of a job in these tests
LEAVE_AFTER_S = 0.03
MAX_TRIES = 8
LARGE_SIDE = 12  # its bytes do not fit into a job

HOSTS = {
    Party.GATEWAY: Party.GATEWAY,
    Party.ENCODER: Party.ENCODER,
    Party.ENCODER_WORKER: Party.ENCODER,
    Party.PREFILL_DECODE: Party.PREFILL_DECODE,
    Party.PREFILL_DECODE_WORKER: Party.PREFILL_DECODE,
    Party.PREFILL: Party.PREFILL,
    Party.DECODE: Party.DECODE,
    Party.CACHE_STORE: Party.CACHE_STORE,
    Party.SOURCE_AGENT: Party.SOURCE_AGENT,
    Party.TARGET_AGENT: Party.SOURCE_AGENT,  # one process, which does both
}
"""Which process a party runs in, here."""

COMMON_STEPS = tuple(each for each in STEPS if each not in (*STAGE_STEPS, *FABRIC_STEPS))
"""Of one host, where one instance prefills and decodes."""


Victim = Party | str | None
"""An instance of a party, if possible the one that is there; or one by its name; or Redis."""


class Action(StrEnum):
    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


@dataclass(frozen=True)
class Point:
    step: Step
    moment: str

    def __str__(self) -> str:
        return f"{self.step.name}.{self.moment}"


def points_of(victim: Party | None, steps: Sequence[Step] = COMMON_STEPS) -> list[Point]:
    """Where in `steps` something happens to `victim` (None: Redis): its own ends of each step, and of the
    steps between others their beginning."""
    found: list[Point] = []
    for step in steps:
        if step.occurs is Occurs.APART:
            continue
        sender, receiver = HOSTS.get(step.sender), HOSTS.get(step.receiver)
        if sender is victim and sender is not None:
            found.append(Point(step, SENDING))
        if receiver is victim and receiver is not None and _is_seen(step):
            found.append(Point(step, RECEIVED))
            if step.channel in (Channel.STREAM, Channel.STORE):
                found.append(Point(step, HANDLED))
        if victim not in (sender, receiver):
            found.append(Point(step, SENDING if sender is not None else RECEIVED))
    return [point for point in found if point.step.name not in UNREACHED]


def _is_seen(step: Step) -> bool:
    return step.name not in ("first_token", "answer", "first_decoded") or step.receiver is Party.GATEWAY


UNREACHED = {
    "cancel_unfit": "only an engine of another shape writes what does not fit",
    "cancel": "an encoder cancels when its worker fails; here they are one process",
    "unwatch_seal": "the same",
    "writer_lost_to_encoder": "the same",
    "ack_failed": "of a request whose time is up; here nothing takes as long",
    "evict_unreadable": "tensors in Redis that are gone; here they are in shared memory",
    "abort": "seen at its receiver, as the end of the connection",
    "disconnect": "a client's end; its effect is `abort`",
    "abort_prefill": "as `abort`",
    "abort_decode": "as `abort`",
}
"""Steps that the questions do not bring about, with the reason."""


_numbers = count(1)


class Scenario:
    """Questions of every kind, a fault in the middle of them, and the check of what is left."""

    def __init__(self, system: FastSystem, faults: Faults) -> None:
        self._system = system
        self._faults = faults

    async def run(self, point: Point, victim: Victim, action: Action, *, always: bool = False) -> Case:
        """As `run_once`; again when a step that always occurs went by unseen: messages overtake others.

        `always`: here it does, although elsewhere it may not.
        """
        for _ in range(MAX_TRIES):
            case = await self.run_once(point, victim, action)
            if case.was_reached or not (always or point.step.occurs is Occurs.ALWAYS):
                return case
        raise CaseError(f"never reached in {MAX_TRIES} cases; the last one:\n{case}")

    async def run_once(self, point: Point, victim: Victim, action: Action) -> Case:
        """Ask, while `action` befalls `victim` at `point`.

        Raises:
            CaseError: a request hangs; or afterwards something does not run, is left over, or not right.
        """
        system = self._system
        case = Case(f"{action} of {victim or REDIS} at {point}", tally_before=system.tally())
        marks, num_exits = system.log_marks(), len(system.exits)
        error: Exception | None = None
        try:
            await self._ask(case, point, victim, action)
        except (CaseError, RuntimeError) as failure:
            error = failure
        case.events += [f"        {name} ended, exit code {code}" for name, code in system.exits[num_exits:]]
        case.tally = system.tally().since(case.tally_before)
        case.logs = system.logs_since(marks)
        if error is not None:
            raise CaseError(f"{error}\n\n{case}") from error
        return case

    async def _ask(self, case: Case, point: Point, victim: Victim, action: Action) -> None:
        system = self._system
        number = 100 * next(_numbers)
        known = Question(f"known {number}", (png(number),))
        async with Client(system.url(), CLIENT_LIMIT_S) as client:
            before = await _answer(client, known)  # its sizes are known from now on, its tensor is not there
            case.others.append(before)
            check([before])
            await asyncio.to_thread(system.wait_until_idle)  # else its encodes count as the case's
            await asyncio.to_thread(system.evict_all)
            case.tally_before = system.tally()
            with ExitStack() as undone:
                act = self._act(case, victim, action, undone)
                reached = undone.enter_context(self._faults.at(point.step.name, point.moment, act))
                *answers, bad_image, left = await asyncio.gather(*_ask_everything(client, number))
            case.was_reached = reached.is_set()  # only now: no process can get there any more
            case.answers += answers
            case.others += [bad_image, left]
            check([each for each in (*answers, bad_image, left) if each.has_hung], lambda answer: False)
            await asyncio.to_thread(system.wait_until_whole)
            await asyncio.to_thread(system.wait_until_idle)
            case.note("whole and idle again")
            after = await _answer(client, Question(f"after {number}", (png(number + 50), png(number))))
            case.others.append(after)
            check([after])

    def _act(self, case: Case, victim: Victim, action: Action, undone: ExitStack) -> Callable[[str], None]:
        faults, system = self._faults, self._system

        def name_of(instance: str) -> str:
            if victim is None:
                name = REDIS
            elif isinstance(victim, Party):
                is_here = system.services[instance].party is victim
                name = instance if is_here else system.names_of(victim)[0]
            else:
                name = victim
            case.note(f"{instance} is there: {action} of {name}")
            return name

        def kill(instance: str) -> None:
            faults.kill(name_of(instance))

        def stop(instance: str) -> None:
            name = name_of(instance)
            faults.stop(name)
            timer = threading.Timer(HANG_S, faults.go_on, (name,))
            timer.start()
            undone.callback(_finish, timer)

        def slow(instance: str) -> None:
            undone.enter_context(faults.slowed(name_of(instance)))

        return {Action.KILL: kill, Action.STOP: stop, Action.SLOW: slow}[action]


async def _answer(client: Client, question: Question, leave_after_s: float | None = None) -> Answer:
    """Also of one that hangs."""
    try:
        return await client.ask(question, leave_after_s)
    except HungError as error:
        return error.answer


def _finish(timer: threading.Timer) -> None:
    timer.join()


def _ask_everything(client: Client, number: int) -> Iterator["asyncio.Future[Answer]"]:
    """New, large, shared, known but gone, none, whole; undecodable; and one whose caller leaves."""
    small, large, left = png(number + 1), png(number + 2, LARGE_SIDE), png(number + 4)
    bad = png(number + 3, LARGE_SIDE)[:90]
    questions = [
        Question(f"new {number}", (small,)),
        Question(f"large {number}", (large,)),
        Question(f"shared {number}", (small, large)),
        Question(f"known {number} again", (png(number),)),
        Question(f"text {number}"),
        Question(f"whole {number}", (png(number + 5),), stream=False),
        Question(f"bad {number}", (bad,)),
    ]
    for question in questions:
        yield asyncio.ensure_future(_answer(client, question))
    yield asyncio.ensure_future(_answer(client, Question(f"left {number}", (left,)), LEAVE_AFTER_S))
