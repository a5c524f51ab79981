"""A worker whose transport fails: the item fails, the engine goes on. Fake store session and transports."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_engine import mm_hash
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.store import Cancel, Descriptor, Done, Seal, StoreReply, TensorSpec, Unpin
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.transport import OnRelease, Place
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import LoadOrder, WriteOrder
from triptych_vllm_connector.worker import writing_loading as workers
from triptych_vllm_connector.worker.writing_loading import LoadingWorker, WritingWorker

A = mm_hash("a")
TENSOR = torch.arange(8, dtype=torch.float32).view(2, 4)
SPEC = TensorSpec(shape=(2, 4), dtype="float32", num_bytes=32)
ORDER = WriteOrder(A, "job", 5, 0, 2, 4, "float32", memory="redis")


class FakeSession:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def submit(self, command: Any) -> "Future[StoreReply]":
        self.sent.append(command)
        future: Future[StoreReply] = Future()
        future.set_result(Done(seq=1))
        return future

    def close(self) -> None:
        pass


class FakeTransports:
    """One end for every memory, which fails while `is_broken`."""

    def __init__(self) -> None:
        self.is_broken = False
        self.error: Exception = BusUnavailableError("away")
        self.memories: list[str] = []

    def writer(self, memory: str) -> "FakeTransports":
        self.memories.append(memory)
        return self

    reader = writer

    def write(self, place: Place, tensor: torch.Tensor) -> None:
        if self.is_broken:
            raise self.error

    def open(self, descriptor: Descriptor, on_release: OnRelease) -> torch.Tensor:
        if self.is_broken:
            raise self.error
        on_release()
        return TENSOR

    def extent(self, memory: str) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    session = FakeSession()
    monkeypatch.setattr(workers.StoreSession, "connect", lambda *args, **kwargs: session)
    return session


@pytest.fixture
def transports(monkeypatch: pytest.MonkeyPatch) -> FakeTransports:
    transports = FakeTransports()
    monkeypatch.setattr(workers, "WorkerTransports", lambda *args: transports)
    return transports


@pytest.fixture
def config(tmp_path: Path) -> ConnectorConfig:
    return ConnectorConfig(
        instance="i-0",
        deployment="d",
        redis_url="unix:///nowhere",
        store_socket=tmp_path / "store.sock",
        namespace_digest="0" * 64,
    )


def test_a_tensor_is_written_where_the_order_says_and_then_sealed(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    WritingWorker(config, 0).write(ORDER, A, TENSOR)
    assert transports.memories == ["redis"]
    assert session.sent == [Seal(seq=0, reservation_id=5)]


def test_what_could_not_be_written_is_never_sealed(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    transports.is_broken = True
    WritingWorker(config, 0).write(ORDER, A, TENSOR)
    assert session.sent == [Cancel(seq=0, reservation_id=5)]


def test_every_order_of_a_step_ends_with_it(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    worker, others = WritingWorker(config, 0), mm_hash("b")
    orders = {
        A: [ORDER, replace(ORDER, reservation_id=6)],
        others: [replace(ORDER, mm_hash=others, reservation_id=7)],
    }
    worker.step_started(orders, {})
    worker.encoded(A, TENSOR)
    worker.encoded(A, TENSOR)  # as for two requests with the same item
    worker.step_ended()
    worker.step_ended()
    assert session.sent == [
        Seal(seq=0, reservation_id=5),
        Seal(seq=0, reservation_id=6),
        Cancel(seq=0, reservation_id=7),
    ]


def test_an_item_that_the_step_did_not_encode_comes_from_vllms_cache(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    worker = WritingWorker(config, 0)
    worker.step_started({A: [ORDER]}, {A: TENSOR})
    assert session.sent == []
    worker.step_ended()
    assert session.sent == [Seal(seq=0, reservation_id=5)]


def test_a_tensor_that_cannot_be_had_is_named_and_its_pin_ends(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    worker = LoadingWorker(config, 0, "cpu")
    descriptor = Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1, memory="redis")
    cache: dict[str, torch.Tensor] = {}
    transports.is_broken = True
    worker.load(cache, [LoadOrder(A, 9, descriptor)])
    assert worker.take_lost() == {A}
    assert worker.take_lost() == frozenset()
    assert cache[A].shape == (2, 4)
    assert not cache[A].any()
    transports.is_broken = False
    worker.load(cache, [LoadOrder(A, 10, descriptor)])
    assert worker.take_lost() == frozenset()
    assert torch.equal(cache[A], TENSOR)
    worker.close()
    assert session.sent == [Unpin(seq=0, pin_id=9), Unpin(seq=0, pin_id=10)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA"), MemoryError()])
def test_torch_errors_fail_the_item_and_not_the_engine(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig, error: Exception
) -> None:
    transports.is_broken, transports.error = True, error
    WritingWorker(config, 0).write(ORDER, A, TENSOR)
    assert session.sent == [Cancel(seq=0, reservation_id=5)]
    worker = LoadingWorker(config, 0, "cpu")
    cache: dict[str, torch.Tensor] = {}
    worker.load(cache, [LoadOrder(A, 9, Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1))])
    assert worker.take_lost() == {A}
    assert cache[A].untyped_storage().nbytes() == 4  # zeros that take no memory
    worker.close()
    assert session.sent[1:] == [Unpin(seq=0, pin_id=9)]


def test_an_error_of_the_device_ends_the_engine(
    session: FakeSession, transports: FakeTransports, config: ConnectorConfig
) -> None:
    """Nothing on this device can be trusted any more: what is written or injected after it neither."""
    transports.is_broken, transports.error = True, torch.AcceleratorError("CUDA error: illegal address")
    with pytest.raises(torch.AcceleratorError):
        WritingWorker(config, 0).write(ORDER, A, TENSOR)
    worker = LoadingWorker(config, 0, "cpu")
    order = LoadOrder(A, 9, Descriptor(mm_hash=A, spec=SPEC, offset=0, generation=1))
    with pytest.raises(torch.AcceleratorError):
        worker.load({}, [order])
    worker.close()
    assert session.sent == [], "the store ends all of it with the session"


def test_an_error_of_the_device_that_a_transport_saw_first_ends_the_engine(
    session: FakeSession,
    transports: FakeTransports,
    config: ConnectorConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's calls report what earlier kernels did; torch says whether the device is lost."""

    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: illegal address")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    transports.is_broken, transports.error = True, CudaError("cudaEventSynchronize: illegal address")
    with pytest.raises(torch.AcceleratorError):
        WritingWorker(config, 0).write(ORDER, A, TENSOR)
    assert session.sent == []
