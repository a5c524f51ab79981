"""Saves encoder outputs: reserved, written and sealed in the worker, within the step that has them."""

import torch

from triptych_common.domain.errors import SpecMismatchError
from triptych_common.protocol.store import AlreadySealed, Ping, Reserve, Reserved, StoreFailure
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.config import StoreConfig
from triptych_vllm_connector.plain.bounded_calls import BoundedCalls
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker

log = get_logger(__name__)


class SavingWorker(WritingWorker):
    """Of rank 0. What cannot be saved is not: whoever needs it encodes it, or asks an encoder again."""

    def __init__(self, config: StoreConfig, device_type: str) -> None:
        super().__init__(config, 0, device_type)
        self._calls = BoundedCalls(config.store_timeout_s)

    def save_item(self, mm_hash: str, tensor: torch.Tensor) -> None:
        """Unless the store has it.

        Raises:
            torch.AcceleratorError: the device is lost, and the engine ends with it.
        """
        try:
            spec = tensor_spec(tensor)
        except SpecMismatchError as error:
            log.warning("encoder output cannot be saved", mm_hash=mm_hash, error=str(error))
            return
        reply = self._calls.try_call(self._session, Reserve(seq=0, mm_hash=mm_hash, spec=spec))
        if isinstance(reply, Reserved):
            self.write_order(_order(mm_hash, reply, tensor), tensor)
        elif isinstance(reply, StoreFailure):
            log.warning("encoder output not saved", mm_hash=mm_hash, code=reply.code, detail=reply.detail)
        elif not isinstance(reply, AlreadySealed):
            log.warning("encoder output not saved", mm_hash=mm_hash, code="unavailable")

    def wait_for_seals(self) -> None:
        """Until all that was written is sealed: the store carries out a session's commands in their order."""
        self._calls.try_call(self._session, Ping(seq=0))


def _order(mm_hash: str, reserved: Reserved, tensor: torch.Tensor) -> WriteOrder:
    return WriteOrder(
        mm_hash=mm_hash,
        job_id="",
        reservation_id=reserved.reservation_id,
        offset=reserved.offset,
        num_embeds=tensor.shape[0],
        width=tensor.shape[1],
        dtype=str(tensor.dtype).removeprefix("torch."),
        generation=reserved.generation,
        memory=reserved.memory,
    )
