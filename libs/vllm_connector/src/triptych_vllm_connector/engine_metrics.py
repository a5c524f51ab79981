"""prefill_decode's own series among vLLM's, in the host: what vLLM's hooks for connectors ask for."""

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from triptych_common.telemetry.metrics import PREFIX
from triptych_vllm_connector.engine_tally import ENGINE_METRICS, EngineMetric, merge_changes


class EngineStats(ECConnectorStats):
    """EngineCore -> host, with a step's output: `Changes` of an `EngineTally`."""

    def reset(self) -> None:
        self.data = dict[str, Any]()

    def aggregate(self, other: ECConnectorStats) -> "EngineStats":
        return EngineStats(data=merge_changes(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line: counters and gauges; of histograms the number."""
        return {
            name if not label else f"{name}_{label}": len(value) if isinstance(value, list) else value
            for name, values in self.data.items()
            for label, value in values.items()
        }

    def is_empty(self) -> bool:
        return not self.data


class EnginePromMetrics(ECConnectorPromMetrics):
    """The series of `ENGINE_METRICS`, in vLLM's registry, with vLLM's labels in front."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics = {metric.name: (metric.kind, self._make(metric)) for metric in ENGINE_METRICS}
        self._series: dict[tuple[int, str, str], Any] = {}  # by engine, name and own label

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """vLLM has got `Changes` from the engine."""
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
