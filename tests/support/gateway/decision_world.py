"""A simulated system of encoders and one instance with a vision tower, for decisions: no I/O, no real time.

Encoders take items one after the other, each from the same queue. The instance does one piece of work at a
time: prefill of a text, prefill of an encoded item (with `overlap` as each is there, else all at once), or a
request that it encodes itself. The gateway's own classes decide and learn, from what a gateway sees.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from triptych_gateway.decision.decision_policy import DecisionFacts, DecisionMode, EncodeDecision
from triptych_gateway.decision.instance_load import InstanceLoad
from triptych_gateway.decision.namespace_decisions import NamespaceDecisions
from triptych_gateway.decision.prediction import CostEstimate, CostKind, Demand, EncoderQueue, Load

INSTANCE = "pd-0"


@dataclass(frozen=True)
class TrueCosts:
    """What the simulated machines really take, in seconds."""

    encode_base_s: float = 0.005
    encode_row_s: float = 0.0006
    local_row_s: float = 0.0006
    local_base_s: float = 0.005
    prefill_token_s: float = 0.0004
    remote_overhead_s: float = 0.005  # for a request: messages, seals
    num_encoders: int = 1
    overlap: bool = True
    shares_compute: bool = False  # only said: requests one at a time do not meet
    jitter: float = 0.0  # of each duration, relative: even from one less it to one more it


@dataclass(frozen=True)
class Asked:
    """A request of the load: images of so many rows each."""

    at: float
    num_images: int
    num_rows: int = 256
    num_text_tokens: int = 20


@dataclass
class Outcome:
    asked: Asked
    decision: EncodeDecision
    first_token_s: float = 0.0


@dataclass
class _Request:
    outcome: Outcome
    estimate: CostEstimate
    busy_s: float
    work_id: int
    total_s: float
    then: Callable[[], None] | None
    left: int  # items that encoders have not made
    ready: int = 0  # made, and not prefilled
    has_text: bool = True  # to be prefilled


@dataclass
class World:
    """`run` plays a load to its end. With `num_clients` each of them sends the next request when one ends."""

    costs: TrueCosts
    mode: DecisionMode
    namespace: NamespaceDecisions = field(init=False)
    outcomes: list[Outcome] = field(default_factory=list)
    now: float = 0.0
    load: InstanceLoad = field(default_factory=InstanceLoad)

    def __post_init__(self) -> None:
        self.namespace = NamespaceDecisions(self.mode)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._items: deque[tuple[_Request, int]] = deque()  # (request, rows)
        self._num_queued, self._queued_rows, self._num_waiting_requests = 0, 0, 0
        self._idle_encoders = [f"encoder-{number}" for number in range(self.costs.num_encoders)]
        self._work: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_working = False
        self._chance = random.Random(0)

    def run(self, load: Sequence[Asked], num_clients: int | None = None) -> list[Outcome]:
        waiting = deque(load)
        if num_clients is None:
            for asked in load:
                self._at(asked.at, partial(self._arrive, asked, None))
        else:

            def ask_next() -> None:
                if waiting:
                    self._arrive(waiting.popleft(), ask_next)

            for _ in range(num_clients):
                self._at(0.0, ask_next)
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
        return self.outcomes

    # ---- the gateway -----------------------------------------------------------------------------
    def _arrive(self, asked: Asked, then: Callable[[], None] | None) -> None:
        namespace, num_rows = self.namespace, asked.num_images * asked.num_rows
        ahead = self.load.work_ahead(INSTANCE, self.now)
        facts = DecisionFacts(
            asked.num_images, asked.num_images, asked.num_images, True, False, True, True,
            is_idle=self.load.is_idle(INSTANCE), shares_compute=self.costs.shares_compute,
        )  # fmt: skip
        queue = EncoderQueue(
            self.costs.num_encoders, self._num_queued, self._queued_rows, self._num_waiting_requests
        )
        load = Load(queue, ahead, ahead)
        demand = Demand(asked.num_images, num_rows, asked.num_images, num_rows, asked.num_text_tokens)
        decision = namespace.policy.rule(facts)
        if decision is None:
            decision = namespace.decide(facts, load, demand, self.now)
        if asked.num_images:
            estimate = namespace.estimate(decision, demand, self.now)
        else:
            estimate = namespace.text_estimate(CostKind.TEXT, asked.num_text_tokens, self.now)
        busy_s = ahead.busy_s(estimate.encode_s)
        work_id = self.load.begin_work(INSTANCE, self.now + estimate.encode_s, estimate.work_s)
        total_s = self.load.total_work_s(INSTANCE)
        outcome = Outcome(asked, decision)
        request = _Request(outcome, estimate, busy_s, work_id, total_s, then, asked.num_images)
        self.outcomes.append(outcome)
        costs = self.costs
        text_s = costs.prefill_token_s * asked.num_text_tokens
        if not asked.num_images:
            self._add_work(text_s, partial(self._answered, request))
        elif decision.is_local:
            rows_s = num_rows * (costs.local_row_s + costs.prefill_token_s)
            self._add_work(text_s + costs.local_base_s + rows_s, partial(self._answered, request))
        else:
            if costs.overlap:
                request.has_text = False
                self._add_work(text_s, _nothing)
            self._num_waiting_requests += 1
            for _ in range(asked.num_images):
                self._items.append((request, asked.num_rows))
                self._num_queued += 1
                self._queued_rows += asked.num_rows
            self._encode_next()

    def _answered(self, request: _Request) -> None:
        waited_s = self.now - request.estimate.decided_at
        request.outcome.first_token_s = waited_s
        self.load.end_work(INSTANCE, request.work_id, self.now)
        disturbed_s = self.load.total_work_s(INSTANCE) - request.total_s
        self.namespace.on_first_token(request.estimate, request.busy_s, disturbed_s, waited_s, self.now)
        if request.then is not None:
            request.then()

    # ---- the encoders ----------------------------------------------------------------------------
    def _encode_next(self) -> None:
        while self._items and self._idle_encoders:
            request, num_rows = self._items.popleft()
            encoder = self._idle_encoders.pop()
            seconds = self._jittered(self.costs.encode_base_s + self.costs.encode_row_s * num_rows)
            self._at(self.now + seconds, partial(self._encoded, request, num_rows, encoder, seconds))

    def _encoded(self, request: _Request, num_rows: int, encoder: str, seconds: float) -> None:
        self._idle_encoders.append(encoder)
        self._num_queued -= 1
        self._queued_rows -= num_rows
        self.namespace.costs.on_completed(encoder, num_rows, seconds, self.now)
        request.left -= 1
        request.ready += num_rows
        self._num_waiting_requests -= not request.left
        if not request.left or self.costs.overlap:
            num_tokens = request.ready
            if request.has_text:
                num_tokens += request.outcome.asked.num_text_tokens
            request.ready = 0
            seconds = self.costs.prefill_token_s * num_tokens
            if request.left:
                self._add_work(seconds, _nothing)
            else:
                self._add_work(seconds + self.costs.remote_overhead_s, partial(self._answered, request))
        self._encode_next()

    # ---- the instance ----------------------------------------------------------------------------
    def _add_work(self, seconds: float, done: Callable[[], None]) -> None:
        self._work.append((seconds, done))
        self._work_on()

    def _work_on(self) -> None:
        if self._is_working or not self._work:
            return
        self._is_working = True
        seconds, done = self._work.popleft()

        def finished() -> None:
            self._is_working = False
            done()
            self._work_on()

        self._at(self.now + self._jittered(seconds), finished)

    def _jittered(self, seconds: float) -> float:
        return seconds * (1.0 + self.costs.jitter * self._chance.uniform(-1.0, 1.0))

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), action))


def _nothing() -> None:
    pass


def mean_s(outcomes: Sequence[Outcome]) -> float:
    """Of the first tokens."""
    return sum(outcome.first_token_s for outcome in outcomes) / len(outcomes)
