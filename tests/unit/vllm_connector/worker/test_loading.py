"""prefill_decode's worker injects tensors. Where its transport fails the item fails, not the engine."""

import pytest
import torch

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.fake_store_worker import TENSOR, FakeStoreSession, FakeTransports
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import Descriptor, TensorSpec, Unpin
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import LoadOrder
from triptych_vllm_connector.worker import store_worker
from triptych_vllm_connector.worker.loading import LoadingWorker

A = mm_hash("a")
SPEC = TensorSpec(shape=(2, 4), dtype="float32", num_bytes=32)


def test_a_tensor_that_cannot_be_read_is_named_and_its_pin_ends(
    session: FakeStoreSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    worker = LoadingWorker(config, 0, "cpu")
    descriptor = Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1, memory="redis")
    cache: dict[str, torch.Tensor] = {}
    transports.is_broken = True
    worker.load_orders(cache, [LoadOrder(A, 9, descriptor)])
    assert worker.take_failed_loads() == {A}
    assert worker.take_failed_loads() == frozenset()
    assert cache[A].shape == (2, 4)
    assert not cache[A].any()
    transports.is_broken = False
    worker.load_orders(cache, [LoadOrder(A, 10, descriptor)])
    assert worker.take_failed_loads() == frozenset()
    assert torch.equal(cache[A], TENSOR)
    ((transport, num_bytes, seconds),) = worker.take_loaded()
    assert (transport, num_bytes) == ("redis", TENSOR.nbytes)
    assert seconds >= 0
    assert worker.take_loaded() == ()
    worker.close()
    assert session.sent == [Unpin(seq=0, pin_id=9), Unpin(seq=0, pin_id=10)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA"), MemoryError()])
def test_torch_errors_fail_the_item_and_not_the_engine(
    session: FakeStoreSession, transports: FakeTransports, config: ConnectorConfig, error: Exception
) -> None:
    transports.is_broken, transports.error = True, error
    worker = LoadingWorker(config, 0, "cpu")
    cache: dict[str, torch.Tensor] = {}
    worker.load_orders(cache, [LoadOrder(A, 9, Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1))])
    assert worker.take_failed_loads() == {A}
    assert cache[A].untyped_storage().nbytes() == 4  # zeros that take no memory
    worker.close()
    assert session.sent == [Unpin(seq=0, pin_id=9)]


def test_an_error_of_the_device_ends_the_engine(
    session: FakeStoreSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    """Nothing on this device can be trusted any more: what is injected after it neither."""
    transports.is_broken, transports.error = True, torch.AcceleratorError("CUDA error: illegal address")
    worker = LoadingWorker(config, 0, "cpu")
    order = LoadOrder(A, 9, Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1))
    with pytest.raises(torch.AcceleratorError):
        worker.load_orders({}, [order])
    worker.close()
    assert session.sent == [], "the store ends all of it with the session"


def test_a_worker_without_transports_leaves_no_session(
    session: FakeStoreSession, config: ConnectorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would keep the name that the next attempt needs."""

    def fail(*args: object) -> None:
        raise StoreUnavailableError("the region cannot be mapped")

    monkeypatch.setattr(store_worker, "WorkerTransports", fail)
    with pytest.raises(StoreUnavailableError):
        LoadingWorker(config, 0, "cpu")
    assert session.is_closed
