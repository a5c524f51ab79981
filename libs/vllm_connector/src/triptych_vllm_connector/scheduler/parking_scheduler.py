"""Schedulers that park: a request that waits for its tensors costs no engine step.

vLLM asks its connector about each waiting request in every step, and steps a thousand times a second
while the answer is no. `ParkingMixin` takes such a request out of the waiting queue until the consumer
reports that its items are pinned, or that they will never be. Loaded by `--scheduler-cls`.

A request that has begun without all of its items, or that runs item by item, stays among the running ones
while it waits for the next item, and keeps its KV blocks: it is stalled. When nothing but stalled requests is
left, the engine waits for input. Stalled requests give back what they hold when others need it
(`partial_preemption`).
"""

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from triptych_common.domain.errors import StoreUnavailableError
from triptych_vllm_connector.connector import TriptychECConnector
from triptych_vllm_connector.consumer.admission import NOT_ASKED
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.overlap import Readiness
from triptych_vllm_connector.grammars.compiled import GONE
from triptych_vllm_connector.scheduler.encoder_cache_manager import PreallocatingEncoderCacheManager
from triptych_vllm_connector.scheduler.failed_loads import LoadsInFlight, undo_failed_loads
from triptych_vllm_connector.scheduler.kv_refusals import describe_kv_caches
from triptych_vllm_connector.scheduler.partial_preemption import PartialPreemption, overlap_policy
from triptych_vllm_connector.scheduler.prefill_budget import PrefillBudget
from triptych_vllm_connector.scheduler.prefill_chunking import DECODE_SHARES, PrefillChunking
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.step_metadata import LoadReport, StepOrders

# A mixin's `super()` is vLLM's scheduler. `Any`, because mypy does not follow imports into vLLM.
_Base: Any = Scheduler if TYPE_CHECKING else object


class LoraSlots:
    """Keeps the adapter slots of stalled requests.

    vLLM admits a waiting request while the requests of this step use fewer than `max_loras` adapters. A
    stalled request is in no step: another adapter would take its slot, and its next step would have more
    adapters than slots, which ends the engine (an assertion in `Scheduler.schedule`).
    """

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras

    def has_room(self, request: Request, running: Iterable[Request]) -> bool:
        """True if the waiting request's adapter has a slot beside those of all running requests."""
        adapter = _adapter_of(request)
        held = {_adapter_of(each) for each in running} - {0}
        return not adapter or adapter in held or len(held) < self._max_loras


def _adapter_of(request: Request) -> int:
    """Id of the request's LoRA adapter; 0 without one."""
    return request.lora_request.lora_int_id if request.lora_request is not None else 0


class ParkingMixin(_Base):
    """Mixin in front of one of vLLM's schedulers; all methods run on EngineCore's thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        connector = self.ec_connector
        manager = self.encoder_cache_manager
        if not isinstance(connector, TriptychECConnector) or not isinstance(
            manager, PreallocatingEncoderCacheManager
        ):
            raise TypeError("the parking scheduler needs Triptych's connector and encoder cache manager")
        self.consumer: Consumer = connector.open_consumer(manager, manager.budget_embeds)
        manager.attach_consumer(self.consumer)
        self._parked: dict[str, Request] = {}
        self._stalled: set[str] = set()
        self._deferred: list[Request] = []
        self._loads_in_flight = LoadsInFlight()
        self._without_slot: list[Request] = []  # requests without an adapter slot in the last step
        self._lora_slots = LoraSlots(self.lora_config.max_loras if self.lora_config else 0)
        self.num_steps = 0
        describe_kv_caches(getattr(self, "connector", None))
        config = connector.config
        policy = overlap_policy(self, is_on=config.overlap, min_tokens=config.overlap_min_tokens)
        share = DECODE_SHARES[config.core_policy] if config.decode_share is None else config.decode_share
        self._prefill_budget = PrefillBudget(self, self._stalled, PrefillChunking(share), self._is_ready)
        self._preemption: PartialPreemption | None = None
        if policy.is_on:
            self.consumer.use_overlap(policy)
            self._preemption = PartialPreemption(self, self.consumer, self._stalled, config.overlap_share)

    def attach_waker(self, wake_engine: Callable[[], None]) -> None:
        """Set the function that wakes EngineCore; called by the plugin."""
        self.consumer.attach_waker(wake_engine)

    # ---- scheduling ------------------------------------------------------------------------------
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._resume_ready()
        self.num_steps += 1
        self._deferred.clear()
        self._without_slot.clear()
        if self._preemption is not None:
            self._preemption.before_step()
        self._prefill_budget.sort_waiting()
        if self._prefill_budget.take_turns:
            self._ask_ahead()
        self._prefill_budget.before_step()
        output = super().schedule(*args, **kwargs)
        is_late = self._prefill_budget.on_step_scheduled(output)
        if isinstance(orders := output.ec_connector_metadata, StepOrders):
            orders.is_late = is_late
        if self._preemption is not None:
            self._deferred += self._preemption.after_step()
        for request in self._deferred:
            self._park(request)
        self._stall(output.num_scheduled_tokens)
        self._loads_in_flight.on_step_scheduled(_loads_of(output))
        return output

    def _ec_transfer_pending(self, request: Request, num_computed_tokens: int) -> bool:
        """True if a waiting request must stay in the queue or be parked; called before it gets KV blocks."""
        if not self._lora_slots.has_room(request, self.running):
            self._without_slot.append(request)
            return True
        pending: bool = super()._ec_transfer_pending(request, num_computed_tokens)
        if not pending and request.mm_features and self.consumer.status(request.request_id).is_partial:
            pending = not self._may_begin_in_part(request)
            if not pending and self._preemption is not None:
                self._preemption.begin(request)
        if pending and not self._holds_kv_blocks(request):
            self._deferred.append(request)
        return pending

    def _may_begin_in_part(self, request: Request) -> bool:
        """True if a waiting request may begin without some items; otherwise it waits for all of them."""
        if self._preemption is not None and self._preemption.may_begin(request):
            return True
        self.consumer.begin_whole(request.request_id)
        return False

    def _is_ready(self, request: Request) -> bool:
        """True if a waiting request has all that its prompt needs, except KV blocks."""
        return self._lora_slots.has_room(request, self.running) and (
            not request.mm_features or self.consumer.status(request.request_id).may_be_scheduled
        )

    def _ask_ahead(self) -> None:
        """Ask about waiting requests, which vLLM does not in a step that running requests fill.

        Where flows take turns, running prompts make way for known requests. Requests beyond a flood's turn
        are not asked about: they would take places among those that wait for space.
        """
        for request in list(self.waiting):
            if not request.mm_features or self.consumer.status(request.request_id) is not NOT_ASKED:
                continue
            if not self._prefill_budget.has_turn(request):
                return  # nor has any behind it
            if not self._lora_slots.has_room(request, self.running):
                continue
            _, num_computed_tokens, _ = self.kv_cache_manager.get_computed_blocks(request)
            if not self.ec_connector.ensure_cache_available(request, num_computed_tokens):
                self._park(request)

    def _try_schedule_encoder_inputs(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.ec_connector.plan_request(request.request_id)
        return super()._try_schedule_encoder_inputs(request, *args, **kwargs)

    def _park(self, request: Request) -> None:
        if self.consumer.status(request.request_id).has_failed:
            return  # stays in the queue: this step's output ends it
        self.waiting.remove_requests([request])
        self.deferred_waiting.discard(request)
        self._parked[request.request_id] = request
        self.consumer.on_parked(request.request_id, self.num_steps)

    def _stall(self, scheduled: Container[str]) -> None:
        """Stall running requests of this step that wait for an item, so that they cost no more steps.

        A partial request is asked about at once, not in a step of its own that would compute nothing.
        """
        for request in self.running:
            engine_request_id = request.request_id
            if engine_request_id in scheduled:
                if not self._is_partial(engine_request_id) or not request.is_prefill_chunk:
                    continue
                self.consumer.admit_request(request, request.num_computed_tokens)
            if self.consumer.status(engine_request_id).waits:
                if engine_request_id not in self._stalled:
                    self.consumer.on_stalled()
                self._stalled.add(engine_request_id)
                self._note_wait(request)

    def _note_wait(self, request: Request) -> None:
        """Start the wait of a stalled request once its last step is done."""
        if not self._is_partial(request.request_id) or not request.num_in_flight_tokens:
            self.consumer.on_parked(request.request_id, self.num_steps)

    def _is_partial(self, engine_request_id: str) -> bool:
        return self._preemption is not None and engine_request_id in self._preemption.partial

    def _end_overdue(self) -> None:
        """End waiting requests past their deadline: their gateways have given up, or hang."""
        for engine_request_id in self.consumer.take_overdue():
            request = self.requests.get(engine_request_id)
            if request is None or request.is_finished():
                continue
            if (
                request.status != RequestStatus.RUNNING
                or engine_request_id in self._stalled
                # It now computes tokens before a missing item.
                or (self._is_partial(engine_request_id) and self.consumer.num_missing(engine_request_id))
            ):
                self.consumer.fail_overdue(request)

    def _resume_ready(self) -> None:
        self._end_overdue()
        woken = self.consumer.drain_inbox()
        if self.consumer.is_store_lost:
            raise StoreUnavailableError("the lease on the cache store is lost: its tensors cannot be trusted")
        for engine_request_id in self._stalled.intersection(woken):
            self._stalled.remove(engine_request_id)
            self.consumer.on_unparked(engine_request_id, self.num_steps)
        ready = [self._parked.pop(each) for each in woken if self._may_leave_parking(each)]
        for request in reversed(ready):  # first come, first served: each goes in front of the next
            self.consumer.on_unparked(request.request_id, self.num_steps)
            self.waiting.prepend_request(request)

    def _may_leave_parking(self, engine_request_id: str) -> bool:
        """True if a parked request has all its items or room to begin without; otherwise its step would be
        empty."""
        request = self._parked.get(engine_request_id)
        if request is None:
            return False
        has_failed = self.consumer.status(engine_request_id).has_failed
        if has_failed or self.consumer.readiness_now(engine_request_id) is not Readiness.PART:
            return True
        return self._may_begin_in_part(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._prefill_budget.on_step_output(scheduler_output)
        reported = model_runner_output.ec_connector_output
        metadata = None if reported is None else reported.ec_connector_worker_meta
        if isinstance(metadata, LoadReport):
            self.consumer.on_loaded(metadata.loaded)
            if metadata.failed:
                undo_failed_loads(
                    metadata.failed, self.consumer, self._loads_in_flight, self, model_runner_output
                )
        self._loads_in_flight.on_step_output(_loads_of(scheduler_output))
        self.consumer.note_waiting(len(self._parked), len(self._stalled))
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        seam.retry_instead(outputs, GONE)
        for engine_request_id in self._stalled:
            self._note_wait(self.requests[engine_request_id])
        return outputs

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        if self._preemption is not None:
            self._preemption.partial.end(request.request_id)
        self._prefill_budget.remove_request(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _free_encoder_input(self, request: Request, input_id: int) -> None:
        """Free an item, unless a step without output loads it: a failed load must find the request.

        vLLM calls this with each output, for every item that the request's tokens cover. The request has a
        step in flight, so the call is repeated.
        """
        if not self._loads_in_flight.is_loading(request.mm_features[input_id].identifier):
            super()._free_encoder_input(request, input_id)

    # ---- what the engine asks --------------------------------------------------------------------
    def has_requests(self) -> bool:
        self._resume_ready()
        if self._stalled and self.get_num_unfinished_requests() == self._num_waiting_for_others:
            return self.has_finished_requests() or self._has_views_to_drop
        has_requests: bool = super().has_requests()
        return has_requests

    @property
    def _num_waiting_for_others(self) -> int:
        """Unfinished requests that a step would not advance: stalled, or without an adapter slot."""
        if self._pause_state != PauseState.UNPAUSED:
            return len(self._stalled)  # vLLM does not count those in the queue
        return len(self._stalled) + sum(map(self._waits_for_slot, self._without_slot))

    def _waits_for_slot(self, request: Request) -> bool:
        """True if the request still waits for an adapter slot and the next step would not end it."""
        return (
            not request.is_finished()
            and not self.consumer.status(request.request_id).has_failed
            and not self._lora_slots.has_room(request, self.running)
        )

    @property
    def _has_views_to_drop(self) -> bool:
        """True if computed items remain; the next step makes workers drop them and end their pins."""
        return self._preemption is not None and bool(self.encoder_cache_manager.freed)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.request_id in self.requests:  # False: it ended a streaming session
            self._prefill_budget.add_request(request)
        if request.mm_features:
            self.consumer.on_request_added(request)

    def reset_encoder_cache(self) -> None:
        for request in self.running:
            self._loads_in_flight.note_departure(request, self)
        super().reset_encoder_cache()
        self.consumer.on_cache_emptied()

    def has_finished_requests(self) -> bool:
        """vLLM's answer without parked requests, which are in `requests` and in no queue."""
        if self.finished_req_ids:
            return True
        if self.connector is None:
            return False
        num_running, num_waiting = self.get_request_counts()
        return len(self.requests) > num_running + num_waiting + len(self._parked)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics with parked requests counted as waiting."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            stats.num_waiting_reqs += len(self._parked)
        return stats

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            request_ids = list(self.requests)
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None and not request.is_finished():
                self._loads_in_flight.note_departure(request, self)
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._parked.pop(request.request_id, None)
            self._stalled.discard(request.request_id)
        return finished

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._loads_in_flight.note_departure(request, self)
        super()._preempt_request(request, *args, **kwargs)
        if request.mm_features:
            if request.request_id in self._stalled:
                self._stalled.remove(request.request_id)
                self.consumer.on_unparked(request.request_id, self.num_steps)
            was_partial = self._preemption is not None and self._preemption.partial.end(request.request_id)
            self.consumer.on_preempted(request.request_id, keeps_deadline=was_partial)


def _loads_of(scheduler_output: Any) -> set[str]:
    """mm_hashes that the workers load in this step."""
    orders = scheduler_output.ec_connector_metadata
    return {order.mm_hash for order in orders.loads} if isinstance(orders, StepOrders) else set()


class ParkingScheduler(ParkingMixin, Scheduler):
    """Parking scheduler for an engine that runs one step at a time."""


class ParkingAsyncScheduler(ParkingMixin, AsyncScheduler):
    """Parking scheduler for an engine that schedules the next step while the last one runs."""


def parking_scheduler(vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """Make the parking scheduler that fits the engine; vLLM calls it in place of a class.

    vLLM decides on asynchronous scheduling while it completes its configuration: a GPU does not mean that
    (some kinds of speculative decoding and executors do without), and with the other class an engine
    computes wrong numbers of tokens.
    """
    is_async = vllm_config.scheduler_config.async_scheduling
    cls = ParkingAsyncScheduler if is_async else ParkingScheduler
    return cls(vllm_config=vllm_config, **options)
