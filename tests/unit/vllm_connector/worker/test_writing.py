"""An encoder's worker writes, seals and cancels. Where its transport fails the item fails, not the engine."""

import pytest
import torch

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.fake_store_worker import TENSOR, FakeStoreSession, FakeTransports
from triptych_common.protocol.store import Cancel
from triptych_common.region.cuda.driver import CudaError
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker

A = mm_hash("a")
ORDER = WriteOrder(A, "job", 5, 0, 2, 4, "float32", memory="redis")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA"), MemoryError()])
def test_torch_errors_fail_the_item_and_not_the_engine(
    session: FakeStoreSession, transports: FakeTransports, config: ConnectorConfig, error: Exception
) -> None:
    transports.is_broken, transports.error = True, error
    WritingWorker(config, 0).write_order(ORDER, TENSOR)
    assert session.sent == [Cancel(seq=0, reservation_id=5)]


def test_an_error_of_the_device_ends_the_engine(
    session: FakeStoreSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    """Nothing on this device can be trusted any more: what is written after it neither."""
    transports.is_broken, transports.error = True, torch.AcceleratorError("CUDA error: illegal address")
    with pytest.raises(torch.AcceleratorError):
        WritingWorker(config, 0).write_order(ORDER, TENSOR)
    assert session.sent == [], "the store ends all of it with the session"


def test_an_error_of_the_device_that_a_transport_saw_first_ends_the_engine(
    session: FakeStoreSession,
    transports: FakeTransports,
    config: ConnectorConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's calls report what earlier kernels did; torch reports whether the device is lost."""

    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: illegal address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    transports.is_broken, transports.error = True, CudaError("cudaEventSynchronize: illegal address")
    with pytest.raises(torch.AcceleratorError):
        WritingWorker(config, 0).write_order(ORDER, TENSOR)
    assert session.sent == []
