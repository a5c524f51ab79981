"""What an encoder's worker does with its orders, under vLLM's own code of both its generations of runners.

vLLM's newer runner (V2, for GPUs) does not encode what its cache has. Its connector, cache and choice of
items run here on the CPU; the encoder is a stand-in. No engine is started.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.fake_store_worker import without_store, worker_config
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.writing import WritingWorker

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import torch
    from vllm.v1.worker import ec_connector_model_runner_mixin as v1
    from vllm.v1.worker.gpu import ec_connector as v2
    from vllm.v1.worker.gpu.mm.encoder_cache import EncoderCache
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState

    from triptych_vllm_connector.config import ConnectorConfig
    from triptych_vllm_connector.connector import TriptychECConnector
    from triptych_vllm_connector.worker import ports, runner_wrappers

A, B, C = mm_hash("a"), mm_hash("b"), mm_hash("c")
ROWS, WIDTH = 2, 4
ORDER = WriteOrder(A, "job-1", 1, 0, ROWS, WIDTH, "float32")


class Connector(TriptychECConnector):
    """Both halves, without a store."""

    def __init__(self, writer: WritingWorker) -> None:
        self._is_producer, self._is_consumer = True, False
        self._connector_metadata, self._writes, self._consumer = None, {}, None
        self.writer, self.loader, self.share = writer, None, None
        assert isinstance(writer._config, ConnectorConfig)
        self.config, self.num_ranks = writer._config, 1


class EncoderError(RuntimeError):
    """The encoder failed."""


@dataclass
class Step:
    """Of vLLM's scheduler output what the runners here read."""

    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)


class RunnerV1:
    """Of vLLM's V1 runner the order of its calls: encode all, keep all, then save each."""

    def __init__(self, instance: "Instance") -> None:
        self._instance = instance

    @property
    def requests(self) -> dict[str, Any]:
        features = self._instance.cache.mm_features
        return {name: SimpleNamespace(mm_features=each) for name, each in features.items()}

    def load_model(self) -> None:
        pass

    def execute_model(self, scheduler_output: Step) -> None:
        self._execute_mm_encoder(scheduler_output)

    def _execute_mm_encoder(self, scheduler_output: Step) -> list[torch.Tensor]:
        scheduled, outputs = scheduler_output.scheduled_encoder_inputs, self._instance.cache.encoder_outputs
        items = [
            self.requests[name].mm_features[i].identifier for name, each in scheduled.items() for i in each
        ]
        tensors = self._instance.run_tower(items)
        outputs.update(zip(items, tensors, strict=True))
        for item in items:
            v1.ECConnectorModelRunnerMixin.maybe_save_ec_to_connector(outputs, item)
        return tensors


class RunnerV2:
    """Of vLLM's V2 runner its own model state and choice of items, over a stand-in for the tower."""

    def __init__(self, instance: "Instance") -> None:
        self.encoder_cache = instance.cache
        self._instance = instance
        self.model_state: Any = None

    def load_model(self) -> None:
        instance = self._instance

        class Tower(EncoderRunner):
            def __init__(self) -> None:
                self.encoder_cache, self.enable_timing = instance.cache, False

            def execute_mm_encoder(self, mm_kwargs: list[Any]) -> list[torch.Tensor]:
                return instance.run_tower([item for _, item in mm_kwargs])

        self.model_state = object.__new__(DefaultModelState)
        self.model_state.encoder_cache, self.model_state.encoder_runner = instance.cache, Tower()

    def execute_model(self, scheduler_output: Step) -> None:
        self.model_state.execute_mm_encoder(scheduler_output.scheduled_encoder_inputs)


class Instance:
    """An encoder: scheduler's half, runner and worker's half. `encoded`: items, as the encoder saw them."""

    def __init__(self, generation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
        self.session, self.transports = without_store(monkeypatch)
        self.connector = Connector(WritingWorker(worker_config(tmp_path), 0))
        for module in (v1, v2):
            monkeypatch.setattr(module, "get_ec_transfer", lambda: self.connector)
            monkeypatch.setattr(module, "has_ec_transfer", lambda: True)
        monkeypatch.setattr(ports, "get_ec_transfer", lambda: self.connector)
        self.cache = EncoderCache()
        self.encoded: list[str] = []
        self.guilty: set[str] = set()  # items for which the tower raises
        runners: dict[str, type[Any]] = {"v1": RunnerV1, "v2": RunnerV2}
        self.runner: Any = runner_wrappers.wrap(runners[generation](self), True)
        self.runner.load_model()
        self._connected = {"v1": self._in_v1, "v2": self._in_v2}[generation]

    def step(self, *orders: WriteOrder, freed: tuple[str, ...] = (), fails: bool = False) -> None:
        """One that encodes an item for each of the orders, each of a request of its own."""
        requests = []
        for order in orders:
            feature = SimpleNamespace(identifier=order.mm_hash, data=order.mm_hash, modality="image")
            request = SimpleNamespace(
                request_id=order.job_id, mm_features=[feature], ec_transfer_params=asdict(order)
            )
            self.connector.update_state_after_alloc(request, 0)
            requests.append(request)
        output = SimpleNamespace(finished_req_ids=set(), ec_connector_metadata=None)
        output.ec_connector_metadata = self.connector.build_connector_meta(output)
        for item in freed:
            self.cache.free_encoder_cache(item)
        for request in requests:
            self.cache.add_request(request.request_id, request.mm_features)
        scheduled = {request.request_id: [0] for request in requests}
        with self._connected(output):
            if fails:
                raise EncoderError
            self.runner.execute_model(Step(scheduled))

    @contextmanager
    def _in_v1(self, output: Any) -> Iterator[None]:
        with v1.ECConnectorModelRunnerMixin.maybe_get_ec_connector_output(output, self.cache.encoder_outputs):
            yield

    @contextmanager
    def _in_v2(self, output: Any) -> Iterator[None]:
        connector = v2.ActiveECConnector(SimpleNamespace(), self.cache.encoder_outputs)
        with connector.maybe_get_output(output):
            yield

    def run_tower(self, items: list[str]) -> list[torch.Tensor]:
        """As one batch: one item for which it raises fails all of them."""
        self.encoded += items
        if self.guilty.intersection(items):
            raise EncoderError
        return [torch.full((ROWS, WIDTH), float(int(item, 16) % 7)) for item in items]

    def check_written(self, *reservation_ids: int) -> None:
        """Each of them once, with what the encoder made of its item, in any order."""
        assert sorted(each for each, _ in self.transports.written) == list(reservation_ids)
        for _, tensor in self.transports.written:
            assert any(torch.equal(tensor, each) for each in self.cache.encoder_outputs.values())
        assert sorted(self.session.sealed) == list(reservation_ids)


@pytest.fixture(params=["v1", "v2"])
def instance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Instance:
    return Instance(request.param, monkeypatch, tmp_path)


def test_each_order_is_written_once(instance: Instance) -> None:
    instance.step(ORDER, replace(ORDER, mm_hash=B, job_id="job-2", reservation_id=2))
    instance.check_written(1, 2)
    instance.step()
    assert instance.session.cancelled == []


def test_an_item_that_the_workers_cache_has_is_written_for_a_new_order(instance: Instance) -> None:
    instance.step(ORDER)
    instance.step(replace(ORDER, job_id="job-2", reservation_id=2))
    instance.check_written(1, 2)
    assert instance.session.cancelled == []


def test_an_item_that_was_freed_meanwhile_is_encoded_again(instance: Instance) -> None:
    instance.step(ORDER)
    instance.step(replace(ORDER, job_id="job-2", reservation_id=2), freed=(A,))
    assert instance.encoded == [A, A]
    instance.check_written(1, 2)


def test_two_orders_of_one_step_for_the_same_item_are_both_written(instance: Instance) -> None:
    instance.step(ORDER, replace(ORDER, job_id="job-2", reservation_id=2))
    instance.check_written(1, 2)
    assert instance.session.cancelled == []


def test_an_order_whose_item_is_not_encoded_is_cancelled_with_its_step(instance: Instance) -> None:
    with pytest.raises(EncoderError):
        instance.step(ORDER, fails=True)
    assert (instance.session.sealed, instance.session.cancelled) == ([], [1])
    instance.step(replace(ORDER, job_id="job-2", reservation_id=2))  # nothing of it is left
    instance.check_written(2)
    assert instance.session.cancelled == [1]


def test_an_item_for_which_the_tower_raises_costs_only_its_own_order(instance: Instance) -> None:
    instance.guilty = {B}
    orders = [
        replace(ORDER, mm_hash=item, job_id=f"job-{number}", reservation_id=number)
        for number, item in enumerate((A, B, C), 1)
    ]
    instance.step(*orders)
    instance.check_written(1, 3)
    assert instance.session.cancelled == [2]
    assert B not in instance.cache.encoder_outputs
    assert instance.connector.writer is not None
    assert instance.connector.writer._orders == {}
    instance.guilty = set()
    instance.step(replace(orders[1], job_id="job-4", reservation_id=4))  # the engine has gone on
    instance.check_written(1, 3, 4)


def test_only_the_first_rank_writes_and_cancels(instance: Instance) -> None:
    assert instance.connector.writer is not None
    instance.connector.writer._rank = 1
    instance.step(ORDER)
    with pytest.raises(EncoderError):
        instance.step(replace(ORDER, mm_hash=B), fails=True)
    assert instance.session.sent == []
    assert instance.transports.written == []
