"""Prompt steps: while requests decode, a step takes no more of the prompts than `PromptChunks` says.

Over one of vLLM's schedulers. Those that decode come first in `running`, so that they get their tokens of
each step; then prompts, in the order of their turns (or priority, where vLLM schedules by it), which share
the chunk; then stalled requests, which give way first. How long a step took is known when its output is
handled.

vLLM looks at running requests first. So prompts that are begun and have later turns are held back for a step
when a waiting request goes before them: then it is begun too, and comes first in the next one.
"""

import time
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from triptych_vllm_connector.scheduler.clipping import can_clip
from triptych_vllm_connector.scheduler.prompt_chunks import PromptChunks
from triptych_vllm_connector.scheduler.prompt_turns import PromptTurns


@dataclass(frozen=True)
class _Step:
    output: Any  # vLLM's SchedulerOutput
    scheduled_at: float
    num_prompt_tokens: int
    num_decoding: int


class PromptSteps:
    """`stalled`: engine request ids of running requests that wait; the parking scheduler keeps it.

    `can_begin`: whether a waiting request has all that it waits for.
    """

    def __init__(
        self,
        scheduler: Any,
        stalled: Set[str],
        chunks: PromptChunks,
        can_begin: Callable[[Request], bool] = lambda request: True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        config = scheduler.scheduler_config
        self._is_on = (
            chunks.is_on
            and can_clip(scheduler)
            and not config.disable_chunked_mm_input
            and not config.long_prefill_token_threshold
        )
        self._scheduler = scheduler
        self._stalled = stalled
        self._chunks = chunks
        self._can_begin = can_begin
        self._now = now
        self._turns = PromptTurns()
        self._held_back: list[Request] = []
        self._passed: str | None = None  # a waiting request for which others were held back, and in vain
        self._max_tokens: int = scheduler.max_num_scheduled_tokens
        self._decoding: set[str] = set()
        self._in_flight: deque[_Step] = deque()
        self._last_output_at = 0.0

    def add_request(self, request: Request) -> None:
        """It has come."""
        flow = (request.ec_transfer_params or {}).get("flow")
        self._turns.add_request(
            request.request_id, flow if isinstance(flow, str) else "", request.num_prompt_tokens
        )

    def remove_request(self, engine_request_id: str) -> None:
        """It has ended. Idempotent."""
        self._turns.remove_request(engine_request_id)

    def before_step(self) -> None:
        """Order what waits and what runs, and bound the step."""
        if self._turns.are_several and not self._is_by_priority:
            self._sort_waiting()
        if not self._is_on:
            return
        scheduler = self._scheduler
        decoding = [each for each in scheduler.running if self._rank(each) == 0]
        self._decoding = {each.request_id for each in decoding}
        scheduler.max_num_scheduled_tokens = self._max_tokens
        if not decoding or not (scheduler.waiting or len(decoding) < len(scheduler.running)):
            return
        max_prompt_tokens = self._chunks.max_prompt_tokens(len(decoding))
        if max_prompt_tokens is not None:
            num_decode_tokens = sum(_num_new_tokens(each) for each in decoding)
            scheduler.max_num_scheduled_tokens = min(max_prompt_tokens + num_decode_tokens, self._max_tokens)
            scheduler.running.sort(key=self._order)
            self._hold_back()

    def _sort_waiting(self) -> None:
        waiting = self._scheduler.waiting
        tags = [self._turns.tag_of(each.request_id) for each in waiting]
        if any(tag > later for tag, later in pairwise(tags)):
            ordered = sorted(waiting, key=lambda each: self._turns.tag_of(each.request_id))
            waiting.clear()
            waiting.extend(ordered)

    def _hold_back(self) -> None:
        """Prompts that run and come after the first of those that wait, if that one can begin."""
        scheduler = self._scheduler
        if not (self._turns.are_several and scheduler.waiting) or self._is_by_priority:
            return
        first = scheduler.waiting.peek_request().request_id
        later = [
            each
            for each in scheduler.running
            if self._rank(each) == 1 and self._turns.goes_before(first, each.request_id)
        ]
        if not later or first == self._passed or not self._has_room(scheduler.waiting.peek_request()):
            return
        self._held_back, self._passed = later, first
        held = {each.request_id for each in later}
        for each in held:
            self._turns.give_way(each, first)
        scheduler.running = [each for each in scheduler.running if each.request_id not in held]

    def _has_room(self, request: Request) -> bool:
        """A seat for each that waits, and KV blocks beside a new one for each that runs."""
        scheduler = self._scheduler
        manager = scheduler.kv_cache_manager
        num_needed = sum(
            cdiv(request.num_tokens, group.kv_cache_spec.block_size) + len(scheduler.running)
            for group in scheduler.kv_cache_config.kv_cache_groups
        )
        num_seats = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
        return bool(
            request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            and len(scheduler.running) + len(scheduler.waiting) <= num_seats
            and num_needed + manager.watermark_blocks <= manager.block_pool.get_num_free_blocks()
            and self._can_begin(request)
        )

    def on_step_scheduled(self, output: Any) -> None:
        """vLLM has scheduled the step."""
        for request in output.scheduled_new_reqs:
            self._turns.begin_prompt(request.req_id)
        if self._held_back:
            self._scheduler.running += self._held_back
            self._held_back = []
        if not self._is_on:
            return
        scheduled = output.num_scheduled_tokens
        decoded = [each for each in scheduled if each in self._decoding]
        num_prompt_tokens = output.total_num_scheduled_tokens - sum(scheduled[each] for each in decoded)
        self._in_flight.append(_Step(output, self._now(), num_prompt_tokens, len(decoded)))

    def on_step_output(self, output: Any) -> None:
        """The step is done. One that was scheduled while another ran has begun when that was done."""
        now = self._now()
        while self._in_flight:
            step = self._in_flight.popleft()
            if step.output is output:
                if not output.scheduled_encoder_inputs:  # else media were encoded too
                    began_at = max(step.scheduled_at, self._last_output_at)
                    self._chunks.note_step(step.num_prompt_tokens, step.num_decoding, now - began_at)
                break
        self._last_output_at = now

    @property
    def _is_by_priority(self) -> bool:
        return bool(self._scheduler.policy == SchedulingPolicy.PRIORITY)

    def _order(self, request: Request) -> tuple[int, float, float]:
        turn = request.priority if self._is_by_priority else self._turns.tag_of(request.request_id)
        return self._rank(request), turn, request.arrival_time

    def _rank(self, request: Request) -> int:
        return 2 if request.request_id in self._stalled else int(request.is_prefill_chunk)


def _num_new_tokens(request: Request) -> int:
    num_tokens = request.num_tokens_with_spec + request.num_output_placeholders
    return max(num_tokens - request.num_computed_tokens, 1)
