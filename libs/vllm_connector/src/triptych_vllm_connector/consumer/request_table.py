"""Request table: owns the admissions, the requests to wake, and those that failed.

No other module changes an `Admission`. It also records the spans of a request's waiting.
"""

from collections.abc import Callable, Iterator
from typing import Any

from triptych_common.protocol.messages import ECTransferParams
from triptych_common.telemetry import record_span, within_trace
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.admission import (
    Admission,
    AdmissionState,
    fault_of,
    make_admission,
    move_admission,
)
from triptych_vllm_connector.consumer.overlap import Readiness

log = get_logger(__name__)

LONGEST_WAIT_S = 24 * 3600.0  # whatever a client sends: timers have a limit


class RequestTable:
    """`encodes_request(request)` is true for locally encoded requests; `now_ns` is wall-clock time."""

    def __init__(
        self, instance: str, encodes_request: Callable[[Any], bool], now_ns: Callable[[], int]
    ) -> None:
        self._instance = instance
        self._encodes_request = encodes_request
        self._now_ns = now_ns
        self._admissions: dict[str, Admission] = {}  # by engine request id
        self._siblings: dict[str, set[str]] = {}  # engine request ids, by the gateway's request id
        self._to_wake: dict[str, None] = {}  # ordered set of engine request ids
        self._failed: set[str] = set()

    def __len__(self) -> int:
        return len(self._admissions)

    def __getitem__(self, engine_request_id: str) -> Admission:
        """Admission of a living request; every request that holds or awaits something is living."""
        return self._admissions[engine_request_id]

    def get(self, engine_request_id: str) -> Admission | None:
        return self._admissions.get(engine_request_id)

    def waiting(self) -> Iterator[Admission]:
        """Admissions whose last answer was no and that were not woken since."""
        return (each for each in self._admissions.values() if each.waits)

    def has_sibling(self, admission: Admission) -> bool:
        """True if another living engine request stands for the same gateway request (`n` > 1)."""
        return bool(self._siblings.get(admission.request_id, set()) - {admission.engine_request_id})

    def remaining_s(self, request: Any) -> float | None:
        """Seconds that `request` (vLLM's) may wait; None for local requests or without a valid value."""
        if self._encodes_request(request) or request.ec_transfer_params is None:
            return None
        if fault_of(request.mm_features, request.ec_transfer_params) is not None:
            return None
        # As it was validated, not as it came: "5000" and 5000.0 pass for a number, too.
        remaining_ms = ECTransferParams.model_validate(request.ec_transfer_params).remaining_ms
        return min(remaining_ms, LONGEST_WAIT_S * 1000) / 1000

    # ---- first and last step ---------------------------------------------------------------------
    def open_request(self, request: Any) -> Admission:
        """Open the admission of a new request (vLLM's); one that cannot be served has failed."""
        admission, fault = self._admission_of(request)
        self._admissions[request.request_id] = admission
        self._siblings.setdefault(admission.request_id, set()).add(admission.engine_request_id)
        if fault is not None:
            self.mark_failed(admission, fault)
        return admission

    def close_request(self, request: Any) -> Admission | None:
        """Close the admission of an ended request; None if it was never opened."""
        self._failed.discard(request.request_id)
        self._to_wake.pop(request.request_id, None)
        admission = self._admissions.pop(request.request_id, None)
        if admission is not None:
            siblings = self._siblings[admission.request_id]
            siblings.discard(admission.engine_request_id)
            if not siblings:
                del self._siblings[admission.request_id]
        return admission

    def admission_of_unopened(self, request: Any) -> Admission:
        """Admission of a request that ended before it was opened: its encoders still wait for acks."""
        return self._admission_of(request)[0]

    # ---- places ----------------------------------------------------------------------------------
    def ask_places(self, admission: Admission, item_indexes: set[int]) -> None:
        """Record that space is asked for at these places, in addition to earlier ones."""
        if item_indexes - admission.asked and admission.state is AdmissionState.NEW:
            move_admission(admission, AdmissionState.QUEUED)
        admission.asked |= item_indexes

    def grant_place(self, admission: Admission, item_index: int) -> None:
        """Record that this place has space. Raises IllegalTransitionError: the request asked for none."""
        if item_index in admission.granted:
            return
        if admission.state not in (AdmissionState.GRANTED, AdmissionState.FAILED):
            move_admission(admission, AdmissionState.GRANTED)
        admission.granted.add(item_index)
        admission.num_places[admission.features[item_index].mm_hash] += 1
        if not admission.is_grant_recorded:
            admission.is_grant_recorded = True
            self._record_span("prefill.preallocate", admission, admission.first_seen_ns, {})

    def drop_place(self, admission: Admission, item_index: int) -> bool:
        """Drop a place; True if it was the last place with space of its item."""
        mm_hash = admission.features[item_index].mm_hash
        was_granted = item_index in admission.granted
        admission.asked.discard(item_index)
        admission.granted.discard(item_index)
        if was_granted:
            admission.num_places[mm_hash] -= 1
        if not admission.asked and admission.state in (AdmissionState.QUEUED, AdmissionState.GRANTED):
            move_admission(admission, AdmissionState.NEW)
        elif not admission.granted and admission.state is AdmissionState.GRANTED:
            move_admission(admission, AdmissionState.QUEUED)
        if not was_granted or admission.num_places[mm_hash]:
            return False
        del admission.num_places[mm_hash]
        return True

    def drop_item(self, admission: Admission, mm_hash: str) -> None:
        for feature in admission.places_of(mm_hash):
            self.drop_place(admission, feature.item_index)

    # ---- failing, waiting and waking -------------------------------------------------------------
    def mark_failed(self, admission: Admission, why: str) -> bool:
        """End the request with an error at the next step, and wake it for that; False if it failed before."""
        if admission.has_failed:
            return False
        move_admission(admission, AdmissionState.FAILED)
        admission.failure = why
        admission.asked &= admission.granted
        self._failed.add(admission.engine_request_id)
        self.wake_request(admission)
        with within_trace(admission.traceparent):
            log.warning("admission failed", request_id=admission.request_id, reason=why)
        return True

    def note_answer(self, admission: Admission, readiness: Readiness, num_computed_tokens: int) -> None:
        """Record the answer to vLLM's question about the request."""
        admission.readiness = readiness
        admission.is_waiting = readiness is Readiness.WAITS
        admission.asked_at = num_computed_tokens

    def begin_whole(self, admission: Admission) -> None:
        """Make the request wait until all that it was granted is here."""
        admission.begins_whole = True

    def note_preempted(self, admission: Admission) -> None:
        """Record a preemption; the request begins whole next time, so it gives way at most once."""
        admission.begins_whole = True
        admission.is_waiting = False

    def wake_request(self, admission: Admission) -> None:
        """Schedule the request to leave parking."""
        self._to_wake[admission.engine_request_id] = None

    def take_to_wake(self) -> list[str]:
        to_wake, self._to_wake = self._to_wake, {}
        for engine_request_id in to_wake:
            self._admissions[engine_request_id].is_waiting = False
        return list(to_wake)

    def take_failed_ids(self) -> set[str]:
        failed, self._failed = self._failed, set()
        return failed

    def note_parked(self, admission: Admission, step: int, num_missing: int) -> None:
        """Record the start of a wait for `num_missing` items at the engine's step number `step`."""
        admission.parked_ns, admission.parked_at_step = self._now_ns(), step
        admission.num_missing = num_missing

    def waited_s(self, admission: Admission) -> float | None:
        """Seconds since the request was parked or stalled; None if it is neither."""
        return None if admission.parked_ns is None else max(0, self._now_ns() - admission.parked_ns) / 1e9

    def note_unparked(self, admission: Admission, step: int) -> None:
        if admission.parked_ns is not None:
            attributes = {
                "triptych.num_engine_steps": step - admission.parked_at_step,
                "triptych.num_computed_tokens": admission.asked_at,
                "triptych.num_items_missing": admission.num_missing,
            }
            self._record_span("prefill.wait", admission, admission.parked_ns, attributes)
            admission.parked_ns = None

    def _admission_of(self, request: Any) -> tuple[Admission, str | None]:
        """New admission of `request`, and the reason if it cannot be served."""
        is_local = self._encodes_request(request)
        fault = None if is_local else fault_of(request.mm_features, request.ec_transfer_params)
        params = request.ec_transfer_params if fault is None else None
        now_ns = self._now_ns()
        admission = make_admission(request.request_id, request.mm_features, params, now_ns, is_local=is_local)
        return admission, fault

    def _record_span(
        self, name: str, admission: Admission, start_ns: int, attributes: dict[str, Any]
    ) -> None:
        record_span(
            name,
            start_ns,
            self._now_ns(),
            traceparent=admission.traceparent,
            attributes={
                "triptych.instance": self._instance,
                "triptych.request_id": admission.request_id,
                "triptych.num_items": len(admission.features),
                **attributes,
            },
        )
