"""Prefill budget: while requests decode, a step takes no more of the prompts than `PrefillChunking` says.

Over one of vLLM's schedulers. Those that decode come first in `running`, so that they get their tokens of
each step; then prompts, in the order of their turns (or priority, where vLLM schedules by it), which share
the chunk; then stalled requests, which give way first. How long a step took is known when its output is
handled.

A prompt that is late (`PrefillFairness`), and is begun or could begin, has larger steps. Where only requests
of flows that are ahead decode, of a flood that is, decoding does not bound them.

vLLM gives what runs its tokens before anything that waits. So a prompt that is begun makes way where flows
take turns: while a request waits whose turn came before, and which could begin, it is left out of the steps.
It keeps its KV blocks. If there is no room for the other one, it goes on.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from triptych_vllm_connector.scheduler.prefill_chunking import CHUNK_SIZES, PrefillChunking
from triptych_vllm_connector.scheduler.prefill_fairness import UNNAMED, PrefillFairness
from triptych_vllm_connector.seams.current import seam


def can_clip(scheduler: Any) -> bool:
    """True if vLLM's scheduler can clip a prompt anywhere and nothing else moves its KV blocks."""
    return bool(
        scheduler.scheduler_config.enable_chunked_prefill
        and not scheduler.is_encoder_decoder
        and not scheduler.need_mamba_block_aligned_split
        and scheduler.connector is None
    )


@dataclass(frozen=True)
class _Step:
    output: Any  # vLLM's SchedulerOutput
    scheduled_at: float
    num_prompt_tokens: int
    num_decoding: int
    is_late: bool


class PrefillBudget:
    """Orders and limits the prompts of a step; the parking scheduler keeps `stalled` (engine request ids).

    `is_ready(request)` is true for a waiting request that would be computed if a step had room for it.
    """

    def __init__(
        self,
        scheduler: Any,
        stalled: Set[str],
        chunks: PrefillChunking,
        is_ready: Callable[[Request], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        config = scheduler.scheduler_config
        self._is_on = (
            chunks.is_on
            and can_clip(scheduler)
            and not config.disable_chunked_mm_input
            and not config.long_prefill_token_threshold
            and seam.local_prefill_interval(scheduler) == 1  # else vLLM keeps prompts out of most steps
        )
        self._scheduler = scheduler
        self._stalled = stalled
        self._chunks = chunks
        self._is_ready = is_ready
        self._now = now
        self._turns = PrefillFairness()
        self._made_way_for = ""  # in this step
        self._without_room: set[str] = set()  # until a request ends
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        self._decoding: set[str] = set()
        self._late: set[str] = set()  # late prompts that this step may compute
        self._in_flight: deque[_Step] = deque()
        self._last_output_at = 0.0

    def add_request(self, request: Request) -> None:
        params = request.ec_transfer_params  # vLLM takes anything
        flow = params.get("flow") if isinstance(params, dict) else UNNAMED
        self._turns.add_request(
            request.request_id, flow if isinstance(flow, str) else UNNAMED, request.num_prompt_tokens
        )

    def remove_request(self, engine_request_id: str) -> None:
        """Remove a request that has ended. Idempotent."""
        if self._turns.has_begun(engine_request_id):
            self._without_room.clear()  # it had KV blocks
        self._without_room.discard(engine_request_id)
        self._turns.remove_request(engine_request_id)

    def sort_waiting(self) -> None:
        """Sort the waiting queue by turns, where several flows have requests."""
        if not self._turns.are_several or self._is_by_priority:
            return
        waiting = self._scheduler.waiting
        tags = [self._turns.tag_of(each.request_id) for each in waiting]
        if any(tag > later for tag, later in pairwise(tags)):
            ordered = sorted(waiting, key=lambda each: self._turns.tag_of(each.request_id))
            waiting.clear()
            waiting.extend(ordered)

    def has_turn(self, request: Request) -> bool:
        """True if no running or new request has an earlier virtual start time."""
        return self._turns.has_turn(request.request_id)

    def before_step(self) -> None:
        """Order the running requests and limit the step; the waiting queue is sorted already."""
        self._late = set()
        if not self._is_on:
            return
        scheduler = self._scheduler
        decoding = [each for each in scheduler.running if self._rank(each) == 0]
        self._decoding = {each.request_id for each in decoding}
        scheduler.max_num_scheduled_tokens = self._max_tokens
        if not scheduler.waiting and len(decoding) == len(scheduler.running):
            return
        ready = list(self._ready()) if self.take_turns else []
        late = self._late_prompts(ready) if self.take_turns else []
        self._late = {each.request_id for each in late}
        max_prompt_tokens = None
        if decoding:
            max_prompt_tokens = self._chunks.max_prompt_tokens(len(decoding), is_late=bool(late))
        elif self.take_turns:
            max_prompt_tokens = self._chunks.max_turn_tokens()
        if late and all(self._turns.is_ahead(each, late[0].request_id) for each in self._decoding):
            max_prompt_tokens = self._max_late_tokens(late, max_prompt_tokens)
        if max_prompt_tokens is not None:
            num_decode_tokens = sum(_num_new_tokens(each) for each in decoding)
            scheduler.max_num_scheduled_tokens = min(max_prompt_tokens + num_decode_tokens, self._max_tokens)
            scheduler.running.sort(key=self._order)
        if ready and max_prompt_tokens != 0:
            self._make_way_for(ready[0])

    def _late_prompts(self, ready: list[Request]) -> list[Request]:
        """Late prompts among the begun ones and `ready`, in the order of their turns."""
        running = (each for each in self._scheduler.running if self._rank(each) == 1)
        late = [each for each in chain(running, ready) if self._turns.is_late(each.request_id)]
        return sorted(late, key=self._turn)

    def _max_late_tokens(self, late: list[Request], otherwise: int | None) -> int | None:
        """Prompt tokens for a step with `late` prompts; leaves no small rest of the first one."""
        most = self._chunks.max_turn_tokens(is_late=True)
        if most is None or otherwise is None:
            return otherwise
        if 0 < _num_new_tokens(late[0]) - most < CHUNK_SIZES[0]:
            most = _num_new_tokens(late[0])
        return max(min(most, sum(map(_num_new_tokens, late))), otherwise)

    def _make_way_for(self, first: Request) -> None:
        """Leave out of this step begun prompts with a later turn than `first`, which could begin."""
        scheduler = self._scheduler
        tag = self._turns.tag_of(first.request_id)
        for request in scheduler.running:
            if self._rank(request) == 1 and self._turns.tag_of(request.request_id) > tag:
                self._made_way_for = first.request_id
                # vLLM skips what is not eligible yet; the step that comes has the next number
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, scheduler.current_step + 2
                )

    def _ready(self) -> Iterator[Request]:
        """Waiting requests that could begin, in order, up to the first without room."""
        scheduler = self._scheduler
        num_active = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        if num_active >= scheduler.max_num_active_reqs or scheduler.pause_state != PauseState.UNPAUSED:
            return
        for request in scheduler.waiting:
            if request.request_id in self._without_room:
                return
            if self._could_begin(request):
                yield request

    def _could_begin(self, request: Request) -> bool:
        return _is_free(request) and self._is_ready(request)

    def on_step_scheduled(self, output: Any) -> bool:
        """Record a scheduled step; True if it computes a prompt that was late before it."""
        for request in output.scheduled_new_reqs:
            self._turns.begin_prompt(request.req_id)
        if not self._is_on:
            return False
        scheduled = output.num_scheduled_tokens
        self._note_room(output)
        decoded = [each for each in scheduled if each in self._decoding]
        num_prompt_tokens = output.total_num_scheduled_tokens - sum(scheduled[each] for each in decoded)
        is_late = not self._late.isdisjoint(scheduled)
        self._in_flight.append(_Step(output, self._now(), num_prompt_tokens, len(decoded), is_late))
        return is_late

    def _note_room(self, output: Any) -> None:
        """Record that the request others made way for found no room, unless the step was full."""
        first, self._made_way_for = self._made_way_for, ""
        is_full = output.total_num_scheduled_tokens >= self._scheduler.max_num_scheduled_tokens
        if not first or first in output.num_scheduled_tokens or is_full:
            return
        if any(first == each.request_id and self._could_begin(each) for each in self._scheduler.waiting):
            self._without_room.add(first)

    def on_step_output(self, output: Any) -> None:
        """Record the end of a step; a step scheduled meanwhile counts as begun at that time."""
        now = self._now()
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.output is output:
                if not output.scheduled_encoder_inputs:  # otherwise the time includes an encode
                    began_at = max(step.scheduled_at, self._last_output_at)
                    self._chunks.note_step(
                        step.num_prompt_tokens, step.num_decoding, now - began_at, is_late=step.is_late
                    )
                break
        self._last_output_at = now

    @property
    def take_turns(self) -> bool:
        """True if begun prompts make way for prompts with an earlier turn."""
        return self._is_on and self._turns.are_several and not self._is_by_priority

    @property
    def _is_by_priority(self) -> bool:
        return bool(self._scheduler.policy == SchedulingPolicy.PRIORITY)

    def _order(self, request: Request) -> tuple[int, float, float]:
        return self._rank(request), *self._turn(request)

    def _turn(self, request: Request) -> tuple[float, float]:
        turn = request.priority if self._is_by_priority else self._turns.tag_of(request.request_id)
        return turn, request.arrival_time

    def _rank(self, request: Request) -> int:
        return 2 if request.request_id in self._stalled else int(request.is_prefill_chunk)


def _is_free(request: Request) -> bool:
    """True if vLLM considers the waiting request for scheduling, now or once it is reached."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        grammar = request.structured_output_request and request.structured_output_request.grammar
        return grammar is not None and not isinstance(grammar, Exception)
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _num_new_tokens(request: Request) -> int:
    num_tokens = request.num_tokens_with_spec + request.num_output_placeholders
    return max(num_tokens - request.num_computed_tokens, 1)
