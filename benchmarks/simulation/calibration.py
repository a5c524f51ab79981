"""Stage times out of a real run: its spans, and vLLM's own times in `llm_request`.

Fitted to workloads with one client, where a stage waits for nothing, and to four clients with text for the
cost of a sequence in a step (0 without that run). The others are left for checking. Medians throughout, so
that a slow moment of the machine does not count. What spans do not show (CPU of Redis, of the gateway's
stream, of the store) is measured by `control_plane` and `store_latency` and handed in.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from simulation.parameters import (
    EncoderCosts,
    EngineCosts,
    GatewayCosts,
    RedisCosts,
    StageTimes,
    StoreCosts,
)
from simulation.real_runs import RealRun
from simulation.workload import RequestKind, Workload
from triptych_common.telemetry.span_records import REQUEST_ID, SpanRecord
from triptych_common.telemetry.trace_files import trace_files

TEXT_RUN, SMALL_RUN, IMAGE_RUN, LONG_RUN, STREAMS_RUN = (
    "one client, text",
    "one client, one small image",
    "one client, one image",
    "one client, long text",
    "four clients, text",
)
ROOT = "request"  # the name of its span has the model's in it
FITTED = (TEXT_RUN, SMALL_RUN, IMAGE_RUN, LONG_RUN, STREAMS_RUN)
NUM_STREAMS = 4
WAITED_S = 0.005  # a request that waited so long was there before the seal
_TTFT, _QUEUE, _PREFILL, _DECODE = (
    f"gen_ai.latency.{name}"
    for name in ("time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode")
)
_PROMPT, _OUTPUT = "gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens"


class CalibrationError(Exception):
    """The traces do not hold what the fit needs."""


@dataclass(frozen=True)
class ControlPlaneCosts:
    """Measured apart from the run, see the module's docstring."""

    redis_command_s: float
    redis_byte_s: float
    item_commands: float
    known_item_commands: float
    beat_commands: float
    request_cpu_s: float  # of the gateway: text, one token
    item_cpu_s: float  # of the gateway: each new image
    chunk_s: float
    store_command_s: float
    store_item_commands: float


class Trace:
    """The spans of one request, by name; the gateway's of the whole request as `ROOT`."""

    def __init__(self, spans: Iterable[SpanRecord]) -> None:
        self.spans: dict[str, list[SpanRecord]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: span.start_ns):
            self.spans[ROOT if span.is_root else span.name].append(span)

    def one(self, name: str) -> SpanRecord:
        """The first span of that name.

        Raises:
            CalibrationError: there is none.
        """
        if not self.spans.get(name):
            raise CalibrationError(f"a trace without the span {name}")
        return self.spans[name][0]

    def seconds(self, name: str) -> float:
        return self.one(name).duration_ms / 1e3

    def llm(self, attribute: str) -> float:
        """Value of one of vLLM's own span attributes."""
        value = self.one("llm_request").attributes.get(attribute)
        if not isinstance(value, (int, float)):
            raise CalibrationError(f"llm_request has no {attribute}")
        return float(value)

    @property
    def scheduled_ns(self) -> float:
        """Time at which vLLM first took the request into a step."""
        return self.one("llm_request").start_ns + (self.llm(_TTFT) - self.llm(_PREFILL)) * 1e9


def read_traces(traces_dir: Path, request_ids: Iterable[str]) -> dict[str, Trace]:
    """Traces by request id, read in one pass; requests without a complete trace are left out."""
    wanted, spans = set(request_ids), defaultdict[str, dict[str, SpanRecord]](dict)
    roots: dict[str, str] = {}
    for span in _all_spans(traces_dir):
        spans[span.trace_id][span.span_id] = span
        request_id = span.attributes.get(REQUEST_ID)
        if span.is_root and request_id in wanted:
            roots[str(request_id)] = span.trace_id
    traces = {request_id: Trace(spans[trace_id].values()) for request_id, trace_id in roots.items()}
    return {request_id: trace for request_id, trace in traces.items() if "llm_request" in trace.spans}


def _all_spans(traces_dir: Path) -> Iterator[SpanRecord]:
    for path in trace_files(traces_dir):
        if not path.exists():  # `trace_files` names what may have been moved meanwhile
            continue
        for line in path.read_bytes().splitlines():
            try:
                yield SpanRecord(**orjson.loads(line))
            except (orjson.JSONDecodeError, TypeError):  # the last line may not be whole
                continue


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b·x through the medians at each x, neither below 0.

    Raises:
        CalibrationError: fewer than two different x.
    """
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    if len(by_x) < 2:
        raise CalibrationError(f"a line needs two points, got {sorted(by_x)}")
    slope, start = statistics.linear_regression(
        list(by_x), [statistics.median(values) for values in by_x.values()]
    )
    if slope < 0:
        return statistics.median(v for values in by_x.values() for v in values), 0.0
    return max(0.0, start), slope


def fit(
    run: RealRun, workloads: dict[str, Workload], traces_dir: Path, control: ControlPlaneCosts, *, name: str
) -> StageTimes:
    """The stage times of a machine on which each engine has a core of its own.

    Raises:
        CalibrationError: the traces do not hold what the fit needs.
    """
    ids = [each.request_id for label in FITTED for each in run.measured.get(label, [])]
    traces = read_traces(traces_dir, ids)
    by_run = {
        label: [traces[m.request_id] for m in run.measured.get(label, []) if m.request_id in traces]
        for label in FITTED
    }
    for label, found in by_run.items():
        if not found and label != STREAMS_RUN:
            raise CalibrationError(f"no traces of {label!r}")
    kinds = {label: workloads[label].kinds[0] for label in FITTED}
    fitter = _Fitter(by_run, kinds)
    clients = [
        m.ttft_s - (t.one("gateway.first_token").end_ns - t.one(ROOT).start_ns) / 1e9
        for label in (TEXT_RUN, IMAGE_RUN)
        for m in run.measured[label]
        if (t := traces.get(m.request_id)) is not None
    ]
    hop_s, gateway = fitter.hop_s(), fitter.gateway(control)
    template_tokens, tokens_per_word = fitter.tokens()
    return StageTimes(
        name=name, origin="measured", note=f"fitted to {len(traces)} traced requests, {run.num_cores} cores",
        row_bytes=fitter.row_bytes(), tokens_per_word=tokens_per_word, template_tokens=template_tokens,
        client_s=max(0.0, statistics.median(clients)), shares_core=True,
        gateway=gateway,
        redis=RedisCosts(
            command_s=control.redis_command_s, byte_s=control.redis_byte_s, hop_s=hop_s,
            item_commands=control.item_commands, known_item_commands=control.known_item_commands,
            beat_commands=control.beat_commands,
        ),
        encoder=fitter.encoder(), engine=fitter.engine(),
        store=StoreCosts(control.store_command_s, control.store_item_commands),
    )  # fmt: skip


class _Fitter:
    """One method for each part; each reads what the part's spans say."""

    def __init__(self, by_run: dict[str, list[Trace]], kinds: dict[str, RequestKind]) -> None:
        self._by_run, self._kinds = by_run, kinds

    def _rows(self, value: Callable[[Trace], float]) -> list[tuple[float, float]]:
        runs = (SMALL_RUN, IMAGE_RUN)
        return [(self._kinds[label].rows_per_image, value(t)) for label in runs for t in self._by_run[label]]

    def _median(self, label: str, value: Callable[[Trace], float]) -> float:
        return statistics.median(value(trace) for trace in self._by_run[label])

    def row_bytes(self) -> int:
        return round(
            self._median(
                IMAGE_RUN, lambda t: float(str(t.one("encoder.write").attributes["triptych.num_bytes"]))
            )
            / self._kinds[IMAGE_RUN].rows_per_image
        )

    def tokens(self) -> tuple[float, float]:
        """(tokens of the template, tokens of a word)."""
        runs = (TEXT_RUN, LONG_RUN)
        return fit_line(
            (self._kinds[label].num_text_words, t.llm(_PROMPT)) for label in runs for t in self._by_run[label]
        )

    def hop_s(self) -> float:
        """Job to the encoder, and sizes back: half of what the wait for sizes has beside the encoder's
        work."""

        def beside(trace: Trace) -> float:
            own = trace.seconds("encoder.preprocess") + trace.seconds("encoder.reserve")
            return (trace.seconds("gateway.encode_wait") - own) / 2

        return max(0.0, self._median(IMAGE_RUN, beside))

    def gateway(self, control: ControlPlaneCosts) -> GatewayCosts:
        def until_dispatch(trace: Trace) -> float:
            return _between(trace.one(ROOT), trace.one("gateway.first_token"))

        def loop_of_image(trace: Trace) -> float:
            others = trace.seconds("gateway.media") + trace.seconds("gateway.encode_wait")
            return until_dispatch(trace) - others

        request_s = self._median(TEXT_RUN, until_dispatch)
        media_s, media_row_s = fit_line(self._rows(lambda t: t.seconds("gateway.media")))
        item_s = max(0.0, self._median(IMAGE_RUN, loop_of_image) - request_s)
        return GatewayCosts(
            request_s=request_s, request_rest_s=max(0.0, control.request_cpu_s - request_s),
            item_s=item_s, item_rest_s=max(0.0, control.item_cpu_s - item_s - media_s),
            media_s=media_s, media_row_s=media_row_s, chunk_s=control.chunk_s,
        )  # fmt: skip

    def encoder(self) -> EncoderCosts:
        preprocess_s, preprocess_row_s = fit_line(self._rows(lambda t: t.seconds("encoder.preprocess")))
        step_s, row_s = fit_line(self._rows(lambda t: t.seconds("encoder.encode")))

        def rate(trace: Trace) -> float:
            span = trace.one("encoder.write")
            return float(str(span.attributes["triptych.num_bytes"])) / max(span.duration_ms / 1e3, 1e-6)

        def until_sealed(trace: Trace) -> float:
            return (trace.one("encoder.seal").end_ns - trace.one("encoder.write").end_ns) / 1e9

        return EncoderCosts(
            preprocess_s=preprocess_s, preprocess_row_s=preprocess_row_s, num_threads=1,
            reserve_s=self._median(IMAGE_RUN, lambda t: t.seconds("encoder.reserve")),
            step_s=step_s, row_s=row_s, step_rows=2048,
            write_bytes_per_s=self._median(IMAGE_RUN, rate),
            seal_s=self._median(IMAGE_RUN, until_sealed),
        )  # fmt: skip

    def engine(self) -> EngineCosts:
        def gap(trace: Trace) -> float:
            return trace.llm(_DECODE) / max(1.0, trace.llm(_OUTPUT) - 1)

        def front(trace: Trace) -> float:
            way = _between(trace.one("gateway.first_token"), trace.one("llm_request"))
            return way + max(0.0, trace.llm(_TTFT) - trace.llm(_QUEUE) - trace.llm(_PREFILL))

        def reply(trace: Trace) -> float:
            ready = trace.one("llm_request").start_ns + trace.llm(_TTFT) * 1e9
            return (trace.one("gateway.first_token").end_ns - ready) / 1e9

        one = self._median(TEXT_RUN, gap)
        many = self._median(STREAMS_RUN, gap) if self._by_run[STREAMS_RUN] else one
        sequence_s = min(one, max(0.0, (many - one) / (NUM_STREAMS - 1)))
        alone = (TEXT_RUN, SMALL_RUN, IMAGE_RUN, LONG_RUN)
        prefill_s, token_s = fit_line(
            (t.llm(_PROMPT), t.llm(_PREFILL)) for label in alone for t in self._by_run[label]
        )
        front_s, front_token_s = fit_line(
            (t.llm(_PROMPT), front(t)) for label in (TEXT_RUN, LONG_RUN) for t in self._by_run[label]
        )
        step_s = one - sequence_s
        return EngineCosts(
            front_s=front_s + max(0.0, prefill_s - step_s), front_token_s=front_token_s,
            reply_s=max(0.0, self._median(TEXT_RUN, reply)), wake_s=self._wake_s(),
            step_s=step_s, token_s=token_s, sequence_s=sequence_s, context_s=0.0,
            inject_bytes_per_s=0.0, max_step_tokens=2048, max_sequences=128, kv_tokens=200_000,
            cache_rows=2048,
        )  # fmt: skip

    def _wake_s(self) -> float:
        late = [
            (trace.scheduled_ns - trace.one("encoder.seal").end_ns) / 1e9
            for trace in self._by_run[IMAGE_RUN]
            if "prefill.wait" in trace.spans and trace.seconds("prefill.wait") > WAITED_S
        ]
        return max(0.0, statistics.median(late)) if late else 0.0


def _between(first: SpanRecord, then: SpanRecord) -> float:
    """Seconds from start to start."""
    return (then.start_ns - first.start_ns) / 1e9
