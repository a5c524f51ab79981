"""Schedulers of decode-only engines, whose prompts come as KV caches from other engines.

Such an engine has no encoder, and waits for no encoder output. A request whose items are not all in the KV
cache, loaded or from the prefix cache, is ended before anything is computed for it, with the reason for its
gateway: its prompt must be prefilled elsewhere first. Missing text is computed. A request that names a KV
cache which it may not read is ended, too (`kv_refusals`).
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.grammars.compiled import GONE
from triptych_vllm_connector.kv_failures import KvFailure
from triptych_vllm_connector.scheduler.kv_refusals import KvRefusals
from triptych_vllm_connector.seams.current import seam

log = get_logger(__name__)

NOTICE_S = 5.0
"""Seconds for which an idle engine goes on with steps, so that an owner hears of a KV cache that is not read.

vLLM sends that notice in a step behind the NIXL handshake, and UCX connects while it is polled, which is in
steps, too. Later the owner's lease ends.
"""

# A mixin's `super()` is vLLM's scheduler. `Any`, because mypy does not follow imports into vLLM.
_Base: Any = Scheduler if TYPE_CHECKING else object


class DecodeMixin(_Base):
    """Mixin in front of one of vLLM's schedulers; all methods run on EngineCore's thread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refusals = KvRefusals()
        self._notices_end_at = 0.0  # monotonic time

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        reads = getattr(output.kv_connector_metadata, "reqs_to_recv", {}).values()
        if not all(any(read.local_block_ids) for read in reads):
            self._notices_end_at = time.monotonic() + NOTICE_S
        return output

    def has_requests(self) -> bool:
        has_requests: bool = super().has_requests()
        return has_requests or time.monotonic() < self._notices_end_at

    def add_request(self, request: Request) -> None:
        token_ids = None if request.abort_immediately else request.prompt_token_ids
        failure = self._refusals.on_added(request.request_id, request.kv_transfer_params, token_ids)
        if failure is KvFailure.KV_LOAD_FAILED:
            log.warning("KV cache is of another prompt", engine_request_id=request.request_id)
        super().add_request(request)

    def _ec_transfer_pending(self, request: Request, num_computed_tokens: int) -> bool:
        """Refuse a waiting request that its KV cache does not cover, before it gets KV blocks."""
        failure = self._refusals.check(
            request.request_id, request.mm_features, num_computed_tokens, request.num_tokens
        )
        if failure is None:
            return False
        log.info(
            "request refused: KV cache does not hold its items",
            reason=failure.value,
            num_computed_tokens=num_computed_tokens,
            num_tokens=request.num_tokens,
        )
        self.ec_connector.refuse_request(request.request_id)
        return True

    def _handle_failed_recving(self, *args: Any, **kwargs: Any) -> set[str]:
        return self._note_failed(super()._handle_failed_recving(*args, **kwargs))

    def _handle_invalid_blocks(self, *args: Any, **kwargs: Any) -> set[str]:
        return self._note_failed(super()._handle_invalid_blocks(*args, **kwargs))

    def _note_failed(self, engine_request_ids: set[str]) -> set[str]:
        self._refusals.on_load_failed(engine_request_ids)
        return engine_request_ids

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Put the reason of a failure into `stop_reason`, since vLLM's errors carry none."""
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        seam.retry_instead(by_client, GONE)
        if len(self._refusals):
            for each in by_client.values():
                for output in each.outputs:
                    if output.finish_reason is None:
                        continue
                    failure = self._refusals.take(output.request_id)
                    if failure is not None:
                        output.stop_reason = failure.value
        return by_client

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Request]:
        finished: list[Request] = super().finish_requests(request_ids, finished_status)
        if finished_status is not RequestStatus.FINISHED_ERROR:
            for request in finished:
                self._refusals.take(request.request_id)
        return finished


class DecodeScheduler(DecodeMixin, Scheduler):
    """Decode scheduler for an engine that runs one step at a time."""


class DecodeAsyncScheduler(DecodeMixin, AsyncScheduler):
    """Decode scheduler for an engine that schedules the next step while the last one runs."""


def decode_scheduler(vllm_config: VllmConfig, **options: Any) -> Scheduler:
    """Make the decode scheduler that fits the engine, as `parking_scheduler` does."""
    is_async = vllm_config.scheduler_config.async_scheduling
    cls = DecodeAsyncScheduler if is_async else DecodeScheduler
    return cls(vllm_config=vllm_config, **options)
