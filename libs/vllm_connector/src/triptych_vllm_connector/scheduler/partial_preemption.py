"""Partial preemption: what partial requests hold goes back as soon as a request that can run needs it.

Over one of vLLM's schedulers, of which it knows the queues and the KV cache:

- `running` is kept in the order: those that compute or decode as vLLM has them, partial requests in their
  prompt, stalled requests. So a resumed prompt takes what decoding leaves of a step, and under first come,
  first served vLLM's own choice (the last one) is a stalled request. When its prompt is computed, a partial
  request goes back to the place of its arrival.
- When the KV cache refuses a running request blocks, the newest stalled request behind it is preempted, and
  it is tried again, before vLLM looks for a victim (by priority, that might be one that runs).
- When it refuses them to a waiting request that has all of its items, likewise, if that helps; and when no
  seat is free for it. vLLM never preempts for the waiting queue.
- A partial request that the KV cache refuses is parked until all of its items are here: it keeps no other
  request from the head of the queue.

Who gave way begins whole the next time (`Consumer.on_preempted`), so each request gives way once at most.
No deadlock: space in the encoder cache is granted before a request begins, and its items come, or fail by a
deadline, without any KV block; who has all of its items takes blocks from those that have not.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.overlap import OverlapPolicy
from triptych_vllm_connector.scheduler.prefill_budget import can_clip
from triptych_vllm_connector.seams.replacing import replace


class PartialRequests:
    """Partial requests, together limited to `max_blocks` and `max_seats` while `is_incomplete(id)`.

        may_begin --yes--> begin --prompt computed, preempted, or ended--> end

    What they hold while they wait, others lack: blocks of the KV cache, and one of the requests that may run
    at once (a seat). So all partial requests that still miss an item have a share of both. A request that is
    the only one of them may be larger than the share of blocks, since it gives way when others need them. A
    request counts with the blocks of its whole prompt, from its beginning on: it will hold them before its
    last item is computed.
    """

    def __init__(self, max_blocks: int, max_seats: int, is_incomplete: Callable[[str], bool]) -> None:
        self._max_blocks = max_blocks
        self._max_seats = max_seats
        self._is_incomplete = is_incomplete
        self._num_blocks: dict[str, int] = {}  # by engine request id, in the order in which they began

    def __len__(self) -> int:
        return len(self._num_blocks)

    def __contains__(self, engine_request_id: str) -> bool:
        return engine_request_id in self._num_blocks

    def ids(self) -> list[str]:
        """Engine request ids, in the order they began."""
        return list(self._num_blocks)

    def may_begin(self, num_blocks: int, num_free_blocks: int) -> bool:
        """True if one more request, whose prompt takes `num_blocks`, may begin."""
        held = [self._num_blocks[each] for each in self._num_blocks if self._is_incomplete(each)]
        if len(held) >= self._max_seats or num_blocks > num_free_blocks:
            return False
        return not held or sum(held) + num_blocks <= self._max_blocks

    def begin(self, engine_request_id: str, num_blocks: int) -> None:
        """Add a request that runs without all of its items."""
        self._num_blocks[engine_request_id] = num_blocks

    def end(self, engine_request_id: str) -> bool:
        """Remove a request that is complete or gone; False if it was not partial."""
        return self._num_blocks.pop(engine_request_id, None) is not None


def newest(requests: Iterable[Any], *, by_priority: bool) -> Any | None:
    """The request that gives way first: the last to arrive, of the lowest priority."""
    return max(
        requests, key=lambda each: (each.priority if by_priority else 0, each.arrival_time), default=None
    )


def overlap_policy(scheduler: Any, *, is_on: bool, min_tokens: int) -> OverlapPolicy:
    """Overlap policy, on only where prompts can be clipped anywhere and nothing else moves KV blocks."""
    return OverlapPolicy(is_on and can_clip(scheduler), min_tokens, scheduler.num_prefill_lookahead)


class PartialPreemption:
    """Preempts stalled requests that hold what others need; the parking scheduler keeps `stalled` (their
    ids).

    `share` limits the KV blocks and seats of incomplete partial requests; one seat is left free.
    """

    def __init__(self, scheduler: Any, consumer: Consumer, stalled: AbstractSet[str], share: float) -> None:
        self._scheduler = scheduler
        self._consumer = consumer
        self._stalled = stalled
        self._pool = scheduler.kv_cache_manager.block_pool
        self.partial = PartialRequests(
            int(share * self._pool.num_gpu_blocks),
            min(int(share * scheduler.max_num_active_reqs), scheduler.max_num_active_reqs - 1),
            lambda engine_request_id: consumer.num_missing(engine_request_id) > 0,
        )
        self._refused: list[Request] = []
        self._preempted: list[Request] = []
        self._allocate = replace(
            scheduler.kv_cache_manager,
            "allocate_slots",
            self._allocate_or_preempt,
            used_by=(Scheduler.schedule,),
        )

    # ---- around a step ---------------------------------------------------------------------------
    def may_begin(self, request: Request) -> bool:
        """True if there is room for this waiting request to begin without all of its items."""
        num_blocks = self._blocks_of_prompt(request)
        watermark = self._scheduler.kv_cache_manager.watermark_blocks
        return self.partial.may_begin(num_blocks + watermark, self._pool.get_num_free_blocks())

    def begin(self, request: Request) -> None:
        """Count an admitted partial request; this step shows whether it gets blocks."""
        self.partial.begin(request.request_id, self._blocks_of_prompt(request))

    def before_step(self) -> None:
        """Order the running requests, and make a seat if a request that can run has none."""
        if not self.partial and not self._stalled:
            return
        for request in self._partial_requests():
            if not request.is_prefill_chunk:
                self.partial.end(request.request_id)
                if request.status == RequestStatus.RUNNING:  # a session may wait for its next input
                    self._restore_place(request)
        self._scheduler.running.sort(key=self._rank)
        self._make_seat()

    def after_step(self) -> list[Request]:
        """Requeue preempted requests in order of arrival; returns the requests that were refused blocks."""
        for request in self._preempted:  # the newest first: each goes in front of the one before
            self._scheduler.waiting.prepend_request(request)
        self._preempted.clear()
        for request in self._partial_requests():
            if request.status != RequestStatus.RUNNING:
                self.partial.end(request.request_id)
        refused, self._refused = self._refused, []
        return refused

    def _partial_requests(self) -> list[Request]:
        return [self._scheduler.requests[each] for each in self.partial.ids()]

    def _rank(self, request: Request) -> int:
        return 2 if request.request_id in self._stalled else int(request.request_id in self.partial)

    def _restore_place(self, request: Request) -> None:
        running = self._scheduler.running
        running.remove(request)
        later = (index for index, other in enumerate(running) if other.arrival_time > request.arrival_time)
        running.insert(next(later, len(running)), request)

    # ---- blocks ----------------------------------------------------------------------------------
    def _allocate_or_preempt(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        """Wrap the KV cache's `allocate_slots`, preempting stalled requests if needed; may return None."""
        blocks = self._allocate(request, *args, **kwargs)
        if blocks is None and request.status != RequestStatus.RUNNING:
            if self.partial.end(request.request_id):
                self._consumer.begin_whole(request.request_id)
                self._refused.append(request)
                return None
            if not self._helps(request, kwargs.get("new_computed_blocks")):
                return None
        while blocks is None and (victim := self._victim(request)) is not None:
            self._preempt(victim)
            blocks = self._allocate(request, *args, **kwargs)
        return blocks

    def _victim(self, request: Request) -> Request | None:
        """Newest request that may give way to `request`, which cannot run without its blocks."""
        running = self._scheduler.running
        # vLLM goes through the running ones: those before it keep their index.
        if request.status == RequestStatus.RUNNING:
            victims = [each for each in running[running.index(request) + 1 :] if self._waits(each)]
        else:
            victims = self._victims_of_waiting()
        return newest(victims, by_priority=self._is_by_priority)

    def _victims_of_waiting(self) -> list[Request]:
        """Partial requests of any priority, since parked they would hold nothing either.

        A request larger than the budget, which is served item by item, keeps its blocks.
        """
        running = self._scheduler.running
        return [each for each in running if each.request_id in self.partial and self._waits(each)]

    def _waits(self, request: Request) -> bool:
        """True if the request is still stalled, so that no step being scheduled reads its blocks."""
        return (
            request.request_id in self._stalled
            and self._consumer.status(request.request_id).waits
            and self._scheduler._request_blocks_can_be_freed(request)
        )

    def _helps(self, request: Request, cached: Any) -> bool:
        """True if the waiting `request` fits once all victims give way; `cached` are its blocks already
        there."""
        running = self._scheduler.running
        if all(each.request_id in self._stalled for each in running):
            return True  # no other request will ever give blocks back
        shared = {
            block.block_id
            for group in (() if cached is None else cached.blocks)
            for block in group
            if block.ref_cnt > 0 and not block.is_null
        }
        num_needed = self._blocks_of_prompt(request) - len(shared)
        num_needed += self._scheduler.kv_cache_manager.watermark_blocks
        num_held = sum(self._blocks_held(each, shared) for each in self._victims_of_waiting())
        return bool(self._pool.get_num_free_blocks() + num_held >= num_needed)

    def _blocks_held(self, request: Request, shared: AbstractSet[int]) -> int:
        """Number of blocks that preempting `request` frees, without those in `shared`."""
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return sum(
            block.ref_cnt == 1 and not block.is_null and block.block_id not in shared
            for group in blocks
            for block in group
        )

    def _blocks_of_prompt(self, request: Request) -> int:
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return sum(cdiv(request.num_tokens, group.kv_cache_spec.block_size) for group in groups)

    # ---- seats -----------------------------------------------------------------------------------
    def _make_seat(self) -> None:
        scheduler = self._scheduler
        num_seats = scheduler.max_num_active_reqs - scheduler.num_waiting_for_streaming_input
        if len(scheduler.running) < num_seats or not scheduler.waiting:
            return
        head = scheduler.waiting.peek_request()
        has_asked = bool(self._consumer.status(head.request_id).asked)
        can_run = not head.mm_features or (has_asked and not self._consumer.num_missing(head.request_id))
        if can_run and head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            victim = newest(self._victims_of_waiting(), by_priority=self._is_by_priority)
            if victim is not None:
                self._preempt(victim)

    def _preempt(self, victim: Request) -> None:
        """Preempt `victim`; it is requeued after this step, because vLLM may be iterating the queue now."""
        scheduler = self._scheduler
        scheduler.running.remove(victim)
        scheduler._preempt_request(victim, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery)
        scheduler.waiting.remove_requests([victim])
        self._preempted.append(victim)

    @property
    def _is_by_priority(self) -> bool:
        return bool(self._scheduler.policy == SchedulingPolicy.PRIORITY)
