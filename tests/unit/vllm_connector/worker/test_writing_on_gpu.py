"""An encoder's worker on a fake GPU: its thread waits for nothing; seals come when the GPU has written."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.cuda.fake_cuda import FakeDriver
from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.fake_store_worker import FakeStoreSession
from tests.support.vllm_connector.gpu_worker import NUM_BYTES, WAIT_S, GpuWorkerMachine
from triptych_common.protocol.store import Cancel, Seal, SlabInfo, StoreCommand, StoreReply
from triptych_common.region.cuda.driver import CudaError
from triptych_common.region.cuda.release import OnDone
from triptych_common.region.cuda.slab import DeviceSlab
from triptych_common.region.transport import TensorWriter
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker

A, B = mm_hash("a"), mm_hash("b")


class Session(FakeStoreSession):
    """Notifies of each command: a thread of the worker sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.has_sent = threading.Condition()

    def submit(self, command: StoreCommand) -> "Future[StoreReply]":
        with self.has_sent:
            future = super().submit(command)
            self.has_sent.notify_all()
        return future

    def wait_for(self, num_commands: int) -> list[StoreCommand]:
        with self.has_sent:
            assert self.has_sent.wait_for(lambda: len(self.sent) >= num_commands, WAIT_S), self.sent
        return self.sent


class Machine(GpuWorkerMachine):
    """One worker whose transports are the GPU's, with a slab and a region."""

    session: Session

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, Session())
        self.tensors = [self.device.own(torch.randn(2, 4)) for _ in range(2)]
        self.num_events = 0

    def new_slab(self) -> SlabInfo:
        slab = DeviceSlab(FakeDriver(self.gpu), NUM_BYTES).info
        self.slab_memory = slab.memory
        return slab

    def writer(self, memory: str) -> TensorWriter:
        return self.ends.region_writer() if memory == "shm" else self.ends.slab_writer()

    def call_when_done(self, on_done: OnDone) -> None:
        self.num_events += 1
        self.ends.call_when_done(on_done)

    def order(self, mm_hash: str, reservation_id: int, memory: str = "shm") -> WriteOrder:
        return WriteOrder(mm_hash, "job", reservation_id, 4096, 2, 4, "float32", memory=memory)

    def kernel(self) -> threading.Event:
        """A kernel that makes the tensors; it runs until the event is set."""
        may_end = threading.Event()
        self.gpu.put(self.device.stream, may_end.is_set)
        return may_end


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.install(monkeypatch)
    yield machine
    machine.end()


def step(worker: WritingWorker, machine: Machine, *orders: WriteOrder) -> None:
    """One step of vLLM that encodes the items of `orders`, as its thread runs it."""
    worker.on_encode_start()
    worker.on_step_start({each.mm_hash: [each] for each in orders}, {})
    for each, tensor in zip(orders, machine.tensors, strict=False):
        worker.on_encoded(each.mm_hash, tensor)
    worker.on_step_end()


@pytest.mark.parametrize("memory", ["shm", "slab"])
def test_a_step_ends_while_the_gpu_computes_and_is_sealed_when_it_has_written(
    machine: Machine, config: ConnectorConfig, memory: str
) -> None:
    worker = WritingWorker(config, 0)
    memory = machine.slab_memory if memory == "slab" else memory
    may_end = machine.kernel()
    step(worker, machine, machine.order(A, 1, memory), replace(machine.order(B, 2, memory), offset=8192))
    assert not worker.wait_written(0.0)
    assert machine.session.sent == [], "nothing that is not there is sealed"
    assert machine.num_events == 1, "one event for the step"
    may_end.set()
    machine.gpu.advance_all()
    assert machine.session.wait_for(2) == [Seal(seq=0, reservation_id=each) for each in (1, 2)]
    assert worker.wait_written(WAIT_S)
    if memory == "shm":
        assert machine.region.view(8192, 32) == machine.tensors[1].numpy().tobytes()


def test_the_next_step_is_launched_meanwhile_and_sealed_behind_it(
    machine: Machine, config: ConnectorConfig
) -> None:
    worker = WritingWorker(config, 0)
    first_may_end = machine.kernel()
    step(worker, machine, machine.order(A, 1))
    second_may_end = machine.kernel()
    step(worker, machine, machine.order(B, 2))
    first_may_end.set()
    machine.gpu.advance_all()
    assert machine.session.wait_for(1) == [Seal(seq=0, reservation_id=1)]
    assert not worker.wait_written(0.0)
    second_may_end.set()
    machine.gpu.advance_all()
    assert machine.session.wait_for(2)[1] == Seal(seq=0, reservation_id=2)


def test_an_order_that_cannot_be_queued_is_cancelled_and_the_others_of_its_step_are_sealed(
    machine: Machine, config: ConnectorConfig
) -> None:
    worker = WritingWorker(config, 0)
    outside = replace(machine.order(A, 1), offset=NUM_BYTES)
    step(worker, machine, outside, machine.order(B, 2))
    assert machine.session.sent == [Cancel(seq=0, reservation_id=1)]
    machine.gpu.advance_all()
    assert machine.session.wait_for(2)[1] == Seal(seq=0, reservation_id=2)


def test_nothing_is_sealed_after_the_gpu_has_failed_and_the_engine_ends(
    machine: Machine, config: ConnectorConfig
) -> None:
    """A kernel's fault is reported by what waits for it: in the thread that would seal."""
    worker = WritingWorker(config, 0)
    machine.driver.fail = "event_synchronize"
    step(worker, machine, machine.order(A, 1, machine.slab_memory))
    with pytest.raises(CudaError, match="event_synchronize"):
        worker.wait_written(WAIT_S)
    assert machine.session.sent == [], "the store ends all of it with the session"
    with pytest.raises(CudaError, match="event_synchronize"):
        worker.on_step_start({}, {})
    machine.driver.fail = None
    machine.gpu.advance_all()


def test_a_worker_that_ends_seals_what_the_gpu_still_writes(
    machine: Machine, config: ConnectorConfig
) -> None:
    worker = WritingWorker(config, 0)
    may_end = machine.kernel()
    step(worker, machine, machine.order(A, 1, machine.slab_memory))
    closing = threading.Thread(target=worker.close)
    closing.start()
    assert not machine.session.is_closed
    may_end.set()
    machine.gpu.advance_all()
    closing.join(WAIT_S)
    assert machine.session.sent == [Seal(seq=0, reservation_id=1)]
    assert machine.session.is_closed
    assert machine.driver.num_closes == 1, "the slab is unmapped behind the copy"


def test_a_seal_that_cannot_be_sent_does_not_hold_up_the_others(
    machine: Machine, config: ConnectorConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WritingWorker(config, 0)
    answer = machine.session.submit

    def lose(command: StoreCommand) -> "Future[StoreReply]":
        if isinstance(command, Seal) and command.reservation_id == 1:
            raise RuntimeError("set to fail")
        return answer(command)

    monkeypatch.setattr(machine.session, "submit", lose)
    step(worker, machine, machine.order(A, 1))
    step(worker, machine, machine.order(B, 2))
    machine.gpu.advance_all()
    assert machine.session.wait_for(1) == [Seal(seq=0, reservation_id=2)]
    assert worker.wait_written(WAIT_S)
