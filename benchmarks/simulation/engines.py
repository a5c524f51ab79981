"""Engines that prefill and decode, step by step: prefill_decodes, and monoliths that encode inside
their steps.

A step decodes one token of every running sequence and fills the rest of its token budget with prefill, in the
order of arrival. A request that cannot run is parked and costs no step. Simpler than vLLM: a sequence keeps
the KV of its whole length from the start (nothing is preempted), and there is no prefix cache.

Every decoding sequence gets one token a step, so the step that ends it is known when it begins to decode: a
step costs the model the same with one sequence as with hundreds.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from simulation.parameters import Deployment, StageTimes
from simulation.requests import Item, Request
from simulation.servers import Server


@dataclass(slots=True)
class Step:
    """Work done in one engine step."""

    num_decoding: int
    prefilling: list[tuple[Request, int]] = field(default_factory=list)
    inject_rows: int = 0
    encode_rows: int = 0

    @property
    def num_prefilled(self) -> int:
        return sum(tokens for _, tokens in self.prefilling)


class EngineModel:
    """One instance. `stream(gateway, chunks, reply_s)` returns when the gateway has passed them on."""

    def __init__(
        self,
        env: simpy.Environment,
        times: StageTimes,
        deployment: Deployment,
        host: int,
        stream: Callable[[int, int, float], float],
    ) -> None:
        self._env, self._times, self._costs = env, times, times.engine
        self._overlap, self._is_monolith = deployment.overlap, deployment.is_monolith
        self._stream = stream
        self.host = host
        self.core = Server(env)
        self.front = self.core if times.shares_core else Server(env)
        self._ungranted: deque[Request] = deque()  # wait for space in the encoder cache, whole requests
        self._waiting: deque[Request] = deque()  # granted; parked ones among them
        self._prefilling: list[Request] = []  # hold KV; stalled ones among them
        self._num_decoding, self._context = 0, 0  # sequences, and tokens in their KV
        self._decoding_of: Counter[int] = Counter()  # by gateway
        self._ending: dict[int, list[Request]] = defaultdict(list)  # by the step that is their last
        self._free_kv = self._costs.kv_tokens
        self._free_rows = self._costs.cache_rows
        self._is_asleep = False
        self._wake = env.event()
        self.num_steps = 0
        self.load_s = 0.0  # of steps, beyond what an empty one costs: grows with the load alone
        env.process(self._run())

    # ---- arrival -----------------------------------------------------------------------------------
    def submit(self, request: Request) -> None:
        """Take a request that has passed the front."""
        self._ungranted.append(request)
        for item in request.items:
            if not item.pinned.triggered and item.pinned.callbacks is not None:
                item.pinned.callbacks.append(self._on_pinned)
        self._grant()
        self._notify()

    def preprocess(self, item: Item) -> simpy.Event:
        """A monolith's own, in its front's one thread."""
        costs = self._times.encoder
        return self.front.done(costs.preprocess_s + costs.preprocess_row_s * item.rows)

    def _on_pinned(self, _event: simpy.Event) -> None:
        self._notify()

    def _notify(self) -> None:
        if self._is_asleep:
            self._is_asleep = False
            self._wake.succeed()

    def _grant(self) -> None:
        while self._ungranted:
            rows = self._ungranted[0].rows
            if rows > self._free_rows and self._free_rows < self._costs.cache_rows:
                return
            self._free_rows -= rows
            self._waiting.append(self._ungranted.popleft())

    # ---- steps -------------------------------------------------------------------------------------
    def _run(self) -> Generator[simpy.Event, Any, None]:
        while True:
            step = self._plan()
            if not step.num_decoding and not step.prefilling:
                self._is_asleep, self._wake = True, self._env.event()
                yield self._wake
                continue
            seconds = self._seconds(step)
            self.load_s += seconds - self._costs.step_s
            yield self.core.done(seconds)
            self.num_steps += 1
            self._finish(step)

    def _plan(self) -> Step:
        step = Step(self._num_decoding)
        budget = self._costs.max_step_tokens - self._num_decoding
        for request in self._prefilling:
            budget -= self._add_prefill(step, request, budget)
        parked: deque[Request] = deque()
        while self._waiting and budget > 0 and self._num_sequences < self._costs.max_sequences:
            request = self._waiting.popleft()
            if request.computable(self._overlap) <= request.computed:
                parked.append(request)  # others overtake it
                continue
            needed = request.num_prompt + request.num_output
            if needed > self._free_kv and self._num_sequences:
                parked.append(request)
                break
            self._free_kv -= needed
            self._prefilling.append(request)
            budget -= self._add_prefill(step, request, budget)
        self._waiting.extendleft(reversed(parked))
        return step

    @property
    def _num_sequences(self) -> int:
        return self._num_decoding + len(self._prefilling)

    def _add_prefill(self, step: Step, request: Request, budget: int) -> int:
        tokens = min(request.computable(self._overlap) - request.computed, budget)
        if tokens <= 0:
            return 0
        for index in range(request.next_item, len(request.items)):
            item = request.items[index]
            start = request.item_ends[index] - item.rows
            if start >= request.computed + tokens:
                break
            if self._is_monolith and request.num_encoded <= index:
                request.num_encoded = index + 1
                step.encode_rows += item.rows
            elif not self._is_monolith and start >= request.computed:
                step.inject_rows += item.rows
        step.prefilling.append((request, tokens))
        return tokens

    def _seconds(self, step: Step) -> float:
        costs, encoder = self._costs, self._times.encoder
        seconds = costs.step_s + costs.token_s * step.num_prefilled
        seconds += costs.sequence_s * step.num_decoding + costs.context_s * self._context
        if step.encode_rows:
            seconds += encoder.step_s + encoder.row_s * step.encode_rows
        if step.inject_rows and costs.inject_bytes_per_s:
            seconds += step.inject_rows * self._times.row_bytes / costs.inject_bytes_per_s
        return seconds

    def _finish(self, step: Step) -> None:
        self._context += self._num_decoding
        chunks = self._decoding_of.copy()
        first: list[Request] = []
        for request, tokens in step.prefilling:
            self._free_rows += request.advance(tokens)
            if request.computed >= request.num_prompt:
                self._prefilling.remove(request)
                first.append(request)
                chunks[request.gateway] += 1
        reply_s = self._costs.reply_s
        at = {gateway: self._stream(gateway, n, reply_s) for gateway, n in chunks.items() if n}
        for request in first:
            request.first_token_s = at[request.gateway]
            self._begin_decode(request)
        for request in self._ending.pop(self.num_steps, ()):
            self._end_decode(request, at[request.gateway])
        self._grant()

    def _begin_decode(self, request: Request) -> None:
        last = self.num_steps + request.num_output - 1
        self._num_decoding += 1
        self._context += request.num_prompt
        self._decoding_of[request.gateway] += 1
        self._ending[last].append(request)

    def _end_decode(self, request: Request, at: float) -> None:
        self._num_decoding -= 1
        self._context -= request.num_prompt + request.num_output - 1
        self._decoding_of[request.gateway] -= 1
        self._free_kv += request.num_prompt + request.num_output
        request.ended_s = at
        request.ended.succeed()
