"""Waits: how long requests wait, and may wait: spans and deadlines."""

from collections.abc import Callable
from typing import Any

from triptych_common.telemetry import record_span
from triptych_vllm_connector.consumer.admission import Admission
from triptych_vllm_connector.consumer.deadlines import GRACE_S, RENEWED_WAIT_S, Deadlines


class Waits:
    """`now_ns` is wall-clock time for spans, `now` monotonic seconds."""

    def __init__(self, instance: str, now_ns: Callable[[], int], now: Callable[[], float]) -> None:
        self._instance = instance
        self._now_ns = now_ns
        self._now = now
        self.deadlines = Deadlines()

    def expect(self, engine_id: str, remaining_s: float) -> None:
        """A request came that may wait so long."""
        self.deadlines.set(engine_id, self._now() + remaining_s + GRACE_S)

    def renew(self, admission: Admission) -> None:
        """It has begun, and waits again: not for ever."""
        if admission.gateway is not None:
            self.deadlines.set(admission.engine_id, self._now() + RENEWED_WAIT_S)

    def granted(self, admission: Admission) -> None:
        """It has space for the first time, or once more."""
        if not admission.grant_recorded:
            admission.grant_recorded = True
            self._record("prefill.preallocate", admission, admission.first_seen_ns, {})

    def parked(self, admission: Admission, step: int) -> None:
        """`step`: the engine's steps so far."""
        if admission.parked_ns is None:
            admission.parked_ns, admission.parked_at_step = self._now_ns(), step
            if not self.deadlines.has(admission.engine_id):
                self.renew(admission)

    def unparked(self, admission: Admission, step: int) -> None:
        if admission.parked_ns is not None:
            num_steps = step - admission.parked_at_step
            attributes = {"triptych.num_engine_steps": num_steps}
            self._record("prefill.wait", admission, admission.parked_ns, attributes)
            admission.parked_ns = None

    def _record(self, name: str, admission: Admission, start_ns: int, attributes: dict[str, Any]) -> None:
        record_span(
            name,
            start_ns,
            self._now_ns(),
            traceparent=admission.traceparent,
            attributes={
                "triptych.instance": self._instance,
                "triptych.request_id": admission.wire_id,
                "triptych.num_items": len(admission.features),
                **attributes,
            },
        )
