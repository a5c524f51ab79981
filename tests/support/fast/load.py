"""Callers without end: some ask with images, new and old, some with text, some leave. All are judged."""

import asyncio
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field

from support.fast.client import Answer, Client, Question
from support.fast.tensors import png

CLIENT_LIMIT_S = 60.0  # above every deadline: a request that takes longer hangs
NUM_OLD_IMAGES = 20
RIGHT, INTERRUPTED = "right", "200 stream_interrupted"
SHARE_TEXT, SHARE_OLD, SHARE_SEVERAL, SHARE_LEAVES, SHARE_WHOLE = 0.25, 0.35, 0.15, 0.05, 0.2
REFUSED_PAUSE_S = 0.05  # as `Retry-After` asks for, shortened


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
            return f"{answer.status} {answer.code}"
        if answer.is_gone:
            if not self._had_death("gateway", started_at):
                self.faults.append(f"the connection was lost, and no gateway was killed: {answer}")
            return "connection lost"
        self.faults.append(f"not a documented error: {answer}")
        return "undocumented"

    def _had_death(self, service: str, since: float) -> bool:
        return any(at >= since - 1.0 for at in self.deaths.get(service, ()))

    def without_token_at_death_of(self, service: str) -> Counter[str]:
        """What became of the requests that waited for their first token when one of `service` was killed."""
        deaths = self.deaths.get(service, ())
        return Counter(span.outcome for span in self.spans if any(map(span.waited_at, deaths)))

    def latencies(self) -> dict[str, float]:
        """Seconds from the question to the end of right answers."""
        right = sorted(span.ended_at - span.started_at for span in self.spans if span.is_right)
        if len(right) < 2:
            return {}
        cuts = statistics.quantiles(right, n=100, method="inclusive")
        return {"p50_s": cuts[49], "p95_s": cuts[94], "p99_s": cuts[98], "max_s": right[-1]}


class Load:
    """`num_callers` callers, each asking one question after the other, at any of the gateways."""

    def __init__(self, urls: list[str], num_callers: int, seed: int) -> None:
        self._urls = urls
        self._num_callers = num_callers
        self._random = random.Random(seed)
        self._num_images = 0
        self.tally = Tally()

    async def run_until(self, done: asyncio.Event) -> None:
        """Until `done`, and the last answers."""
        clients = [Client(url, CLIENT_LIMIT_S) for url in self._urls]
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self._num_callers):
                    group.create_task(self._call(clients, number, done))
        finally:
            for client in clients:
                await client.close()

    async def _call(self, clients: list[Client], number: int, done: asyncio.Event) -> None:
        while not done.is_set():
            question, leave_after_s = self._question()
            order = self._random.sample(clients, len(clients))
            started_at = time.monotonic()
            try:
                answer = await _ask_first_that_listens(order, question, leave_after_s)
            except TimeoutError:
                self.tally.outcomes["hung"] += 1
                self.tally.faults.append(f"hung for {CLIENT_LIMIT_S} s: {question.text}")
                continue
            self.tally.judge(answer, started_at)
            if not answer.is_right:
                await asyncio.sleep(REFUSED_PAUSE_S)  # a caller's backoff

    def _question(self) -> tuple[Question, float | None]:
        rng = self._random
        leave_after_s = rng.uniform(0.0, 0.3) if rng.random() < SHARE_LEAVES else None
        kind = rng.random()
        if kind < SHARE_TEXT:
            images: tuple[bytes, ...] = ()
        elif kind < SHARE_TEXT + SHARE_OLD:
            images = (png(rng.randrange(NUM_OLD_IMAGES)),)
        elif kind < SHARE_TEXT + SHARE_OLD + SHARE_SEVERAL:
            images = tuple(self._any_image() for _ in range(rng.randint(2, 4)))
        else:
            images = (self._new_image(),)
        text = f"question {rng.randrange(1 << 30)}"
        num_tokens = len(images) + rng.randint(1, 40)
        return Question(text, images, num_tokens, stream=rng.random() >= SHARE_WHOLE), leave_after_s

    def _any_image(self) -> bytes:
        rng = self._random
        return png(rng.randrange(NUM_OLD_IMAGES)) if rng.random() < 0.5 else self._new_image()

    def _new_image(self) -> bytes:
        self._num_images += 1
        return png(1_000_000 + self._num_images)


async def _ask_first_that_listens(
    clients: list[Client], question: Question, leave_after_s: float | None
) -> Answer:
    """As a balancer does: a gateway that takes no connection is passed over."""
    for client in clients[:-1]:
        answer = await client.ask(question, leave_after_s)
        if not answer.fault.startswith("ConnectError"):
            return answer
    return await clients[-1].ask(question, leave_after_s)
