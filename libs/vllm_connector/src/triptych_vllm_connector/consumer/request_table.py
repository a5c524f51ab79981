"""Request table: the admission of each living request, who is to be woken, and who has failed."""

from collections.abc import Callable
from typing import Any

from triptych_common.protocol.messages import ECTransferParams
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.admission import Admission, fault_of, make_admission
from triptych_vllm_connector.consumer.preallocator import Preallocator
from triptych_vllm_connector.consumer.speech import Speech

log = get_logger(__name__)

LONGEST_WAIT_S = 24 * 3600.0  # whatever is said: timers end somewhere


class RequestTable:
    """`encodes(request)`: is it encoded by this instance itself? Then it only needs space."""

    def __init__(
        self,
        speech: Speech,
        preallocator: Preallocator,
        encodes: Callable[[Any], bool],
        now_ns: Callable[[], int],
    ) -> None:
        self._speech = speech
        self._preallocator = preallocator
        self._encodes = encodes
        self._now_ns = now_ns
        self._admissions: dict[str, Admission] = {}
        self._to_wake: dict[str, None] = {}  # ordered set of engine request ids
        self._failed: set[str] = set()

    def __len__(self) -> int:
        return len(self._admissions)

    def __getitem__(self, engine_id: str) -> Admission:
        """Of a request that lives, as everybody does who holds or awaits something."""
        return self._admissions[engine_id]

    def get(self, engine_id: str) -> Admission | None:
        return self._admissions.get(engine_id)

    def add(self, request: Any) -> Admission:
        """First sight of a request (vLLM's)."""
        admission = self._admissions[request.request_id] = self._admission_of(request)
        self._speech.opened(admission)
        return admission

    def take(self, request: Any) -> Admission | None:
        """`request` has ended. None: it was never looked at."""
        self._failed.discard(request.request_id)
        self._to_wake.pop(request.request_id, None)
        return self._admissions.pop(request.request_id, None)

    def unseen(self, request: Any) -> Admission:
        """Of a request that ended before it was looked at: its encoders wait for a word all the same."""
        return self._admission_of(request)

    def remaining_s(self, request: Any) -> float | None:
        """How long `request` may wait from now; None: nothing sensible was said, or it waits for nobody."""
        if self._encodes(request) or fault_of(request.mm_features, request.ec_transfer_params) is not None:
            return None
        if request.ec_transfer_params is None:
            return None
        # As it was validated, not as it came: "5000" and 5000.0 pass for a number, too.
        remaining_ms = ECTransferParams.model_validate(request.ec_transfer_params).remaining_ms
        return min(remaining_ms, LONGEST_WAIT_S * 1000) / 1000

    # ---- failing and waking ----------------------------------------------------------------------
    def fail(self, admission: Admission, why: str) -> None:
        """End the request with an error at the next step; it is woken for that, and waits for nothing."""
        if admission.failure is None:
            admission.failure = why
            self._preallocator.preallocate(admission.engine_id, [])
            admission.asked &= admission.granted
            self._failed.add(admission.engine_id)
            self.wake(admission)
            log.warning("request failed", request_id=admission.wire_id, reason=why)

    def wake(self, admission: Admission) -> None:
        """It shall leave the parking."""
        self._to_wake[admission.engine_id] = None

    def take_to_wake(self) -> list[str]:
        """In the order in which they were woken."""
        to_wake, self._to_wake = self._to_wake, {}
        for engine_id in to_wake:
            self._admissions[engine_id].waits = False
        return list(to_wake)

    def take_failed(self) -> set[str]:
        failed, self._failed = self._failed, set()
        return failed

    def _admission_of(self, request: Any) -> Admission:
        is_local = self._encodes(request)
        fault = None if is_local else fault_of(request.mm_features, request.ec_transfer_params)
        params = request.ec_transfer_params if fault is None else None
        admission = make_admission(request.request_id, request.mm_features, params, self._now_ns())
        admission.fault, admission.is_local = fault, is_local
        return admission
