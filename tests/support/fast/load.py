"""Callers without end: some ask with images, new and old, some with text, some leave. All are judged."""

import asyncio
import random
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.processes.tensors import png

CLIENT_LIMIT_S = 60.0  # above every deadline of `FastSystem`: a request that takes longer hangs
NUM_OLD_IMAGES = 20
RIGHT, INTERRUPTED = "right", "200 stream_interrupted"
SHARE_TEXT, SHARE_OLD, SHARE_SEVERAL, SHARE_LEAVES, SHARE_WHOLE = 0.25, 0.35, 0.15, 0.05, 0.2
SHARE_GOES_ON = 0.2  # with a conversation
NUM_CONVERSATIONS = 20  # the latest ones
REFUSED_PAUSE_S = 0.05  # as `Retry-After` asks for, shortened
LEAVE_WITHIN_S = 0.3
CONNECTION_LOST = "connection lost"


@dataclass(frozen=True)
class Span:
    """One request in time (seconds, monotonic). `first_token_at` None: there was none."""

    started_at: float
    first_token_at: float | None
    ended_at: float
    outcome: str

    @property
    def is_right(self) -> bool:
        return self.outcome == RIGHT

    def waited_at(self, at: float) -> bool:
        """Was it under way then, without a token? A stream that was interrupted had one on its way."""
        if self.outcome == INTERRUPTED:
            return False
        return self.started_at < at < (self.first_token_at or self.ended_at)


@dataclass
class Tally:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what must never be
    refused: list[Answer] = field(default_factory=list)  # with documented errors, before their first token
    spans: list[Span] = field(default_factory=list)
    deaths: dict[str, list[float]] = field(default_factory=dict)  # by service, when one was killed

    def judge(self, answer: Answer, started_at: float) -> None:
        if answer.fault == "left":
            self.outcomes["left"] += 1
            if answer.is_wrong:
                self.faults.append(f"wrong: {answer}")
            return
        outcome = self._outcome(answer, started_at)
        self.outcomes[outcome] += 1
        ended_at = started_at + answer.elapsed_s
        self.spans.append(Span(started_at, answer.first_token_at, ended_at, outcome))

    def _outcome(self, answer: Answer, started_at: float) -> str:
        if answer.is_wrong:
            self.faults.append(f"wrong: {answer} instead of {answer.question.words}: {answer.words}")
            return "wrong"
        if answer.is_right:
            return RIGHT
        if answer.is_documented_error:
            if not answer.has_begun:
                self.refused.append(answer)
            return f"{answer.status} {answer.code}"
        if answer.is_gone:
            if not self._had_death("gateway", started_at):
                self.faults.append(f"the connection was lost, and no gateway was killed: {answer}")
            return CONNECTION_LOST
        self.faults.append(f"not a documented error: {answer}")
        return "undocumented"

    def _had_death(self, service: str, since: float) -> bool:
        return any(at >= since - 1.0 for at in self.deaths.get(service, ()))

    def without_token_at_death_of(self, service: str) -> Counter[str]:
        """What became of the requests that waited for their first token when one of `service` was killed.

        Without those whose connection was lost: to a killed gateway (`_outcome`), which says nothing of this.
        """
        deaths = self.deaths.get(service, ())
        kept = (span for span in self.spans if span.outcome != CONNECTION_LOST)
        return Counter(span.outcome for span in kept if any(map(span.waited_at, deaths)))

    def latencies(self) -> dict[str, float]:
        """Seconds from the question to the end of right answers."""
        right = sorted(span.ended_at - span.started_at for span in self.spans if span.is_right)
        if len(right) < 2:
            return {}
        cuts = statistics.quantiles(right, n=100, method="inclusive")
        return {"p50_s": cuts[49], "p95_s": cuts[94], "p99_s": cuts[98], "max_s": right[-1]}


class Questions(Protocol):
    """Where questions come from, with the right answers to them."""

    def draw(self, rng: random.Random, is_new: Sequence[bool], *, stream: bool) -> Question:
        """One with an image for each of `is_new`: a new one, or one that may be known."""


class FastQuestions:
    """For `FastSystem`: the right answer follows from the question. Some go on with an earlier one."""

    def __init__(self) -> None:
        self._num_images = 0
        self._asked: deque[Question] = deque(maxlen=NUM_CONVERSATIONS)

    def draw(self, rng: random.Random, is_new: Sequence[bool], *, stream: bool) -> Question:
        if self._asked and rng.random() < SHARE_GOES_ON:
            before = rng.choice(self._asked)
            text = f"and {rng.randrange(1 << 30)}"
            return replace(before, text=text, stream=stream, earlier=(*before.earlier, before.text, "yes"))
        question = self._new_question(rng, is_new, stream=stream)
        self._asked.append(question)
        return question

    def _new_question(self, rng: random.Random, is_new: Sequence[bool], *, stream: bool) -> Question:
        images = tuple(self._new_image() if new else png(rng.randrange(NUM_OLD_IMAGES)) for new in is_new)
        num_tokens = len(images) + rng.randint(1, 40)
        return Question(f"question {rng.randrange(1 << 30)}", images, num_tokens, stream)

    def _new_image(self) -> bytes:
        self._num_images += 1
        return png(1_000_000 + self._num_images)


class Load:
    """`num_callers` callers, each asking one question after the other, at any of the gateways.

    Args:
        limit_s: above every deadline: a request that takes longer hangs.
        refused_pause_s: how long a caller waits after an answer that is not right.
        leave_within_s: a caller that leaves does so after up to so many seconds.
    """

    def __init__(
        self,
        urls: list[str],
        num_callers: int,
        seed: int,
        questions: Questions | None = None,
        *,
        limit_s: float = CLIENT_LIMIT_S,
        refused_pause_s: float = REFUSED_PAUSE_S,
        leave_within_s: float = LEAVE_WITHIN_S,
    ) -> None:
        self._urls = urls
        self.num_callers = num_callers
        self._random = random.Random(seed)
        self._questions = questions or FastQuestions()
        self._limit_s = limit_s
        self._refused_pause_s = refused_pause_s
        self._leave_within_s = leave_within_s
        self.tally = Tally()

    async def run_until(self, done: asyncio.Event) -> None:
        """Until `done`, and the last answers."""
        clients = [Client(url, self._limit_s) for url in self._urls]
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.num_callers):
                    group.create_task(self._call(clients, done))
        finally:
            for client in clients:
                await client.close()

    async def _call(self, clients: list[Client], done: asyncio.Event) -> None:
        while not done.is_set():
            question, leave_after_s = self._question()
            order = self._random.sample(clients, len(clients))
            started_at = time.monotonic()
            try:
                answer = await _ask_first_that_listens(order, question, leave_after_s)
            except TimeoutError:
                self.tally.outcomes["hung"] += 1
                self.tally.faults.append(f"hung for {self._limit_s} s: {question.text}")
                continue
            self.tally.judge(answer, started_at)
            if not answer.is_right:
                await asyncio.sleep(self._refused_pause_s)  # a caller's backoff

    def _question(self) -> tuple[Question, float | None]:
        rng = self._random
        leave_after_s = rng.uniform(0.0, self._leave_within_s) if rng.random() < SHARE_LEAVES else None
        kind = rng.random()
        if kind < SHARE_TEXT:
            is_new = []
        elif kind < SHARE_TEXT + SHARE_OLD:
            is_new = [False]
        elif kind < SHARE_TEXT + SHARE_OLD + SHARE_SEVERAL:
            is_new = [rng.random() < 0.5 for _ in range(rng.randint(2, 4))]
        else:
            is_new = [True]
        return self._questions.draw(rng, is_new, stream=rng.random() >= SHARE_WHOLE), leave_after_s


async def _ask_first_that_listens(
    clients: list[Client], question: Question, leave_after_s: float | None
) -> Answer:
    """As a balancer does: a gateway that takes no connection is passed over."""
    for client in clients[:-1]:
        answer = await client.ask(question, leave_after_s)
        if not answer.fault.startswith("ConnectError"):
            return answer
    return await clients[-1].ask(question, leave_after_s)
