"""The EC connector class, for producer and consumer, scheduler side and worker side.

vLLM makes one object in EngineCore and one in each worker. Each delegates to the part that belongs there: the
`Consumer`, or the worker's `WritingWorker` and `LoadingWorker`.
"""

from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver

from triptych_common.telemetry import setup_service_tracing
from triptych_common.telemetry.logs import get_logger, setup_logging
from triptych_common.telemetry.metrics import PREFIX
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.consumer.consumer import Consumer
from triptych_vllm_connector.consumer.item_pins import EngineItemState
from triptych_vllm_connector.consumer.local_encode import LocalEncode, encodes_no_request
from triptych_vllm_connector.consumer.ports import EncoderCache
from triptych_vllm_connector.engine_counters import ENGINE_METRICS, EngineMetric, merge_changes
from triptych_vllm_connector.host.model_facts import budget_embeds
from triptych_vllm_connector.links.opening import open_consumer
from triptych_vllm_connector.process_exit import end_quickly, leave_signals_to_host
from triptych_vllm_connector.slab_probe import UsableSlab
from triptych_vllm_connector.step_metadata import LoadReport, StepOrders
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.cores.compute_share import ComputeShare
from triptych_vllm_connector.worker.cores.opening import open_share
from triptych_vllm_connector.worker.loading import LoadingWorker
from triptych_vllm_connector.worker.writing import WritingWorker

log = get_logger(__name__)


class EngineStats(ECConnectorStats):
    """EngineCore -> host, with a step's output: `Changes` of an `EngineCounters`."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: ECConnectorStats) -> "EngineStats":
        return EngineStats(data=merge_changes(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """Values for vLLM's log line: counters, gauges, and the number of a histogram's observations."""
        return {
            name if not label else f"{name}_{label}": len(value) if isinstance(value, list) else value
            for name, values in self.data.items()
            for label, value in values.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class EnginePromMetrics(ECConnectorPromMetrics):
    """The series of `ENGINE_METRICS` in vLLM's registry, with vLLM's labels in front."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = {metric.name: (metric.kind, self._make(metric)) for metric in ENGINE_METRICS}
        self._series: dict[tuple[int, str, str], Any] = {}  # by engine, name and own label

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, values in transfer_stats_data.items():
            kind, _ = self._metrics[name]
            for label, value in values.items():
                series = self._series_of(engine_idx, name, label)
                if kind == "gauge":
                    series.set(value)
                elif kind == "counter":
                    series.inc(value)
                else:
                    for each in value:
                        series.observe(each)

    def _series_of(self, engine_idx: int, name: str, label: str) -> Any:
        key = (engine_idx, name, label)
        if key not in self._series:
            labels = [*self.per_engine_labelvalues[engine_idx], *([label] if label else [])]
            self._series[key] = self._metrics[name][1].labels(*labels)
        return self._series[key]

    def _make(self, metric: EngineMetric) -> Any:
        name, labels = f"{PREFIX}_{metric.name}", [*self._labelnames, *metric.labels]
        if metric.kind == "gauge":
            return self._gauge_cls(name, metric.text, labels, multiprocess_mode="mostrecent")
        if metric.kind == "counter":
            return self._counter_cls(name, metric.text, labels)
        return self._histogram_cls(name, metric.text, labels, buckets=metric.buckets)


class TriptychECConnector(ECConnectorBase):
    """The EC connector that `ec_connector_module_path` names; its options are a `ConnectorConfig`."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        leave_signals_to_host()
        end_quickly()
        self.config = ConnectorConfig.from_vllm(vllm_config)
        service = "prefill_decode" if self.is_consumer else "encoder"
        setup_logging(service, self.config.instance, self.config.log_level)
        self._tracing = setup_service_tracing(service, self.config)
        self.num_ranks: int = vllm_config.parallel_config.tensor_parallel_size
        self._writes: dict[str, list[WriteOrder]] = {}
        self._consumer: Consumer | None = None
        self._plans_local = False
        self._refused: set[str] = set()
        self._closers: list[Any] = []
        self.slab = UsableSlab()
        self.writer: WritingWorker | None = None
        self.loader: LoadingWorker | None = None
        self.share: ComputeShare | None = None
        if role is ECConnectorRole.WORKER:
            rank: int = vllm_config.parallel_config.rank
            device_type: str = vllm_config.device_config.device_type
            self.share = open_share(self.config, device_type, self.num_ranks)
            self._closers.append(self.share)
            if self.is_producer:
                self.writer = WritingWorker(self.config, rank, device_type)
                self._closers.append(self.writer)
            if self.is_consumer and not self.config.decodes_only:
                self.loader = LoadingWorker(self.config, rank, device_type)
                self._closers.append(self.loader)

    # ---- scheduler side: consumer ----------------------------------------------------------------
    def open_consumer(self, cache: EncoderCache, cache_size: int) -> Consumer:
        """Connect to the store and the bus; `cache_size` is vLLM's encoder cache in rows."""
        model_config = self._vllm_config.model_config
        encodes_request = encodes_no_request
        if self.config.has_encoder:
            encodes_request = LocalEncode(
                PlaceholderMetadataResolver(model_config).fields_for
            ).encodes_request
        budget = budget_embeds(self.config, cache_size, model_config)
        self._consumer, closers = open_consumer(
            self.config, self.num_ranks, budget, cache, encodes_request, self.slab
        )
        self._closers += closers
        return self._consumer

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return self._consumer is None or self._consumer.admit_request(request, num_computed_tokens)

    def plan_request(self, engine_request_id: str) -> None:
        """Note the request whose items vLLM plans next: `has_cache_item` receives only the item's name."""
        self._plans_local = self._consumer is not None and self._consumer.status(engine_request_id).is_local

    def has_cache_item(self, identifier: str) -> bool:
        if self._consumer is None or self._plans_local:
            return False
        return self._consumer.item_state(identifier) is EngineItemState.PINNED

    def refuse_request(self, engine_request_id: str) -> None:
        """Refuse a request, which vLLM then ends with an error at the end of this step."""
        self._refused.add(engine_request_id)

    def take_unavailable_requests(self) -> set[str]:
        refused, self._refused = self._refused, set()
        return refused | (self._consumer.take_failed() if self._consumer is not None else set())

    def update_state_after_free(self, request: Any, index: int) -> None:
        """Handle an item whose placeholder is computed."""
        if self._consumer is not None:
            self._consumer.on_item_computed(request.request_id, index)

    # ---- scheduler side: both --------------------------------------------------------------------
    def update_state_after_alloc(self, request: Any, index: int) -> None:
        mm_hash = request.mm_features[index].identifier
        if self._consumer is not None:
            self._consumer.load_item(request.request_id, mm_hash)
        elif self.is_producer and request.ec_transfer_params is not None:
            order = WriteOrder(**request.ec_transfer_params)
            self._writes.setdefault(order.mm_hash, []).append(order)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders:
        writes, self._writes = self._writes, {}
        if self._consumer is None:
            return StepOrders(writes)
        loads = self._consumer.take_loads()
        starts, drops = self._consumer.take_starts()
        return StepOrders(writes, loads, starts=starts, drops=drops)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        if self._consumer is not None and request.mm_features:
            # vLLM counts tokens when it schedules them; those of steps without output are not computed yet.
            computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            self._consumer.on_finished(request, computed)
        return False, None  # True would never be cleared by vLLM

    # ---- metrics ---------------------------------------------------------------------------------
    def get_ec_connector_stats(self) -> EngineStats | None:
        """Changes since the last step, which reach the host with the step's output. Called in EngineCore."""
        changes = self._consumer.take_changes() if self._consumer is not None else {}
        return EngineStats(data=changes) if changes else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EngineStats:
        return EngineStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EnginePromMetrics | None:
        """Metrics of the host, created once; None for an encoder, whose vLLM reports nothing."""
        if not vllm_config.ec_transfer_config.is_ec_consumer:
            return None
        return EnginePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # ---- worker side -----------------------------------------------------------------------------
    def orders(self) -> StepOrders:
        metadata = self._get_connector_metadata()
        if not isinstance(metadata, StepOrders):
            raise TypeError(f"expected StepOrders, got {type(metadata).__name__}")
        return metadata

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        if self.loader is not None:
            orders = self.orders()
            self.loader.drop_copies(orders.drops)
            self.loader.load_orders(encoder_cache, orders.loads)
            self.loader.start_copies(orders.starts)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Begin a step's writes; `save_caches` follows for newly encoded items, not for those in
        `encoder_cache`."""
        if self.writer is not None:
            self.writer.on_step_start(self.orders().writes, kwargs["encoder_cache"])

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.writer is not None:
            self.writer.on_encoded(mm_hash, encoder_cache[mm_hash])

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self.writer is not None:
            self.writer.on_step_end()

    def build_connector_worker_meta(self) -> LoadReport | None:
        if self.loader is None:
            return None
        report = LoadReport(self.loader.take_failed_loads(), self.loader.take_loaded())
        return report if report.failed or report.loaded else None

    def shutdown(self) -> None:
        for closer in self._closers:
            closer.close()
        self._closers.clear()
        self._tracing.shutdown()
