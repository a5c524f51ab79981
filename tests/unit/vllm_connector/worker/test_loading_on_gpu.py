"""prefill_decode's worker on a fake GPU: a pinned item is copied before the step that loads it."""

import queue
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.fake_store_worker import FakeStoreSession
from tests.support.vllm_connector.gpu_worker import NUM_BYTES, WAIT_S, GpuWorkerMachine
from triptych_common.protocol.store import Descriptor
from triptych_common.region.tensor_view import tensor_spec
from triptych_common.region.transport import TensorReader
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.step_orders import LoadOrder
from triptych_vllm_connector.worker.loading import LoadingWorker

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.connector import TriptychECConnector
    from triptych_vllm_connector.step_metadata import StepOrders

A, OFFSET = mm_hash("a"), 4096


class Machine(GpuWorkerMachine):
    """One worker that reads the region through the GPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, FakeStoreSession())
        self.tensor = torch.randn(4, 8)
        self.write(self.tensor)
        self._reader: TensorReader | None = None

    def write(self, tensor: torch.Tensor) -> None:
        self.region.view(OFFSET, tensor.nbytes)[:] = tensor.numpy().tobytes()

    def reader(self, memory: str) -> TensorReader:
        self._reader = self._reader or self.ends.region_reader()
        return self._reader

    def extent(self, memory: str) -> None:
        return None

    def order(self, pin_id: int, offset: int = OFFSET) -> LoadOrder:
        spec = tensor_spec(self.tensor)
        return LoadOrder(
            A, pin_id, Descriptor(mm_hash=A, spec=spec, offset=offset, generation=1, memory="shm")
        )

    def advance_copies(self) -> None:
        for stream in self.gpu.streams:
            if stream != self.device.stream:
                self.gpu.advance(stream)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    machine.install(monkeypatch)
    yield machine
    machine.end()


@pytest.fixture
def worker(machine: Machine, config: ConnectorConfig) -> Iterator[LoadingWorker]:
    worker = LoadingWorker(config, 0, "cpu")
    yield worker
    machine.gpu.advance_all()
    worker.close()


def released(worker: LoadingWorker) -> "queue.SimpleQueue[int | None]":
    """Pins that the worker ends from now on, in place of the thread that would send them."""
    worker._released.put(None)
    worker._releaser.join(WAIT_S)
    return worker._released


def test_a_pinned_item_is_copied_before_its_step_and_loaded_without_another_copy(
    machine: Machine, worker: LoadingWorker
) -> None:
    pins, cache = released(worker), dict[str, torch.Tensor]()
    worker.start_copies([machine.order(7)])
    machine.advance_copies()
    machine.write(torch.zeros(4, 8))  # shows which copy the step has: this one would be of the load
    worker.load_orders(cache, [machine.order(7)])
    assert torch.equal(cache[A], machine.tensor)
    machine.advance_copies()
    assert pins.get(timeout=WAIT_S) == 7, "the pin ends once"
    assert pins.empty()
    assert worker.take_failed_loads() == frozenset()


def test_the_step_waits_for_a_copy_that_is_not_done(machine: Machine, worker: LoadingWorker) -> None:
    cache: dict[str, torch.Tensor] = {}
    seen: list[torch.Tensor] = []
    worker.start_copies([machine.order(7)])
    worker.load_orders(cache, [machine.order(7)])
    machine.gpu.put(machine.device.stream, lambda: not seen.append(cache[A].clone()))
    machine.gpu.advance(machine.device.stream)
    assert not seen
    machine.advance_copies()
    machine.gpu.advance(machine.device.stream)
    assert torch.equal(seen[0], machine.tensor)


@pytest.mark.parametrize("case", ["dropped", "another pin"])
def test_a_copy_of_a_pin_that_ended_is_not_used(machine: Machine, worker: LoadingWorker, case: str) -> None:
    cache: dict[str, torch.Tensor] = {}
    worker.start_copies([machine.order(7)])
    machine.advance_copies()
    if case == "dropped":
        worker.drop_copies([A])
    machine.write(torch.ones(4, 8))
    worker.load_orders(cache, [machine.order(7 if case == "dropped" else 8)])
    machine.gpu.advance_all()
    assert cache[A].all(), "read anew"


def test_the_worker_starts_and_drops_copies_as_a_steps_orders_say(
    machine: Machine, worker: LoadingWorker
) -> None:
    connector = object.__new__(TriptychECConnector)  # without the start that needs an engine
    connector.loader = worker
    cache: dict[str, torch.Tensor] = {}

    def step(orders: StepOrders) -> None:
        connector.bind_connector_metadata(orders)
        connector.start_load_caches(cache)
        machine.advance_copies()

    step(StepOrders(starts=[machine.order(7)]))
    machine.write(torch.ones(4, 8))
    step(StepOrders(loads=[machine.order(7)]))
    assert torch.equal(cache[A], machine.tensor), "copied by the step before"
    step(StepOrders(starts=[machine.order(8)]))
    machine.write(torch.zeros(4, 8))
    step(StepOrders(drops=[A]))
    step(StepOrders(loads=[machine.order(8)]))
    assert not cache[A].any(), "copied anew"


def test_a_copy_that_cannot_be_started_is_left_to_the_load(machine: Machine, worker: LoadingWorker) -> None:
    cache: dict[str, torch.Tensor] = {}
    worker.start_copies([machine.order(7, offset=NUM_BYTES)])
    assert worker.take_failed_loads() == frozenset()
    worker.load_orders(cache, [machine.order(7)])
    machine.gpu.advance_all()
    assert torch.equal(cache[A], machine.tensor)
