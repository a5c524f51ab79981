"""The two model runner wrappers: mixins in front of vLLM's own runner class.

Encode, gather and free are calls of the runner to itself, so an object around it would never see them.
`wrap` makes a class of mixin and runner class and gives it to the runner that exists; its state, the
encoder cache's dict above all, stays as it is.
"""

import time
from typing import Any, TypeVar

from vllm.distributed.ec_transfer import get_ec_transfer

from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.connector import TriptychECConnector

log = get_logger(__name__)
Runner = TypeVar("Runner")


class EncoderNotAllowedError(TriptychError):
    """A step asked for the encoder on an instance that must not encode."""


def connector_of_worker() -> TriptychECConnector:
    """This worker's connector.

    Raises:
        TypeError: the engine was started with another one.
    """
    connector = get_ec_transfer()
    if not isinstance(connector, TriptychECConnector):
        raise TypeError(f"expected TriptychECConnector, got {type(connector).__name__}")
    return connector


class DisaggEncodeGPURunnerWrapper:
    """Encoder: marks when a step's encoding starts, so that each item's encode, write and seal are timed.

    The name says GPU because vLLM's own runner class does, on every platform. `execute_model` is the
    runner's one entry, in both of vLLM's generations of runners.
    """

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_encoder_inputs:
            connector = connector_of_worker()
            if connector.writer is not None:
                connector.writer.encode_started()
            if connector.config.debug_encode_delay_s > 0:
                time.sleep(connector.config.debug_encode_delay_s)  # noqa: TID251 -- the test option's purpose
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]


class DisaggPrefillDecodeGPURunnerWrapper:
    """prefill_decode: never lets a step run the encoder, unless the instance has one for fallback.

    Injection is timed where it happens, in `workers.LoadingWorker`.
    """

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        planned = scheduler_output.scheduled_encoder_inputs
        if planned and not connector_of_worker().config.has_encoder:
            raise EncoderNotAllowedError(
                f"this instance has no encoder, but a step plans to encode {planned}"
            )
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]


def wrap(runner: Runner, is_producer: bool) -> Runner:
    """Put the wrapper of the instance's role in front of the runner's class. Idempotent."""
    mixin = DisaggEncodeGPURunnerWrapper if is_producer else DisaggPrefillDecodeGPURunnerWrapper
    cls = type(runner)
    if not issubclass(cls, mixin):
        runner.__class__ = type(f"{mixin.__name__}[{cls.__name__}]", (mixin, cls), {})
        log.info("model runner wrapped", wrapper=mixin.__name__, runner=cls.__name__)
    return runner
