"""Metrics of the gateway (`GET /metrics`; `docs/reference/metrics.md`). No label holds text of a caller."""

import math
from dataclasses import dataclass

from triptych_common.telemetry.metrics import BYTES_BUCKETS, NUMBER_BUCKETS, Metrics, PlainSeries

TEXT, MIXED, OTHER = "text", "mixed", "other"
MAX_MODELS = 32  # that have series of their own: names come from instances, and instances come and go
MAX_VERSIONS = 64  # over all models
LATENCY_LABELS = ("route", "model", "modality")
SHARE_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)

# vLLM's own, so that the engine's and the gateway's series can be laid over each other.
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_BUCKETS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LatencySeries:
    """Series of one route, model and modality."""

    first_token_s: PlainSeries
    inter_token_s: PlainSeries
    per_output_token_s: PlainSeries
    e2e_s: PlainSeries


class LatencyMetrics:
    """Latencies of callers, by vLLM's names."""

    def __init__(self, metrics: Metrics) -> None:
        self._first_token_s = metrics.plain_histogram(
            "gateway_time_to_first_token_seconds",
            "Arrival to the first token (streamed answers)",
            LATENCY_LABELS,
            FIRST_TOKEN_BUCKETS_S,
        )
        self._inter_token_s = metrics.plain_histogram(
            "gateway_inter_token_latency_seconds",
            "Each gap between tokens (streamed answers)",
            LATENCY_LABELS,
            TOKEN_BUCKETS_S,
        )
        self._per_output_token_s = metrics.plain_histogram(
            "gateway_request_time_per_output_token_seconds",
            "First token to the last, by the tokens after the first (streamed answers)",
            LATENCY_LABELS,
            TOKEN_BUCKETS_S,
        )
        self._e2e_s = metrics.plain_histogram(
            "gateway_e2e_request_latency_seconds",
            "Arrival to the end of a good answer",
            LATENCY_LABELS,
            REQUEST_BUCKETS_S,
        )
        self._known: dict[tuple[str, str, str], LatencySeries] = {}
        self._models: set[str] = set()

    def of(self, route: str, model: str, modality: str) -> LatencySeries:
        """Return the series of a listed `route` and `modality`, and the answering instance's `model`."""
        key = (route, self.bounded(model), modality)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = LatencySeries(
                self._first_token_s.labels(*key),
                self._inter_token_s.labels(*key),
                self._per_output_token_s.labels(*key),
                self._e2e_s.labels(*key),
            )
        return known

    def bounded(self, model: str) -> str:
        """Return `model`, or `other` where as many as may have series of their own were seen before."""
        if model not in self._models:
            if len(self._models) >= MAX_MODELS:
                return OTHER
            self._models.add(model)
        return model


class VersionMetrics:
    def __init__(self, metrics: Metrics) -> None:
        self._answers = metrics.counter(
            "gateway_version_answers",
            "Answers of instances, by the version of the model that they announce, and why that one",
            ("model", "version", "reason"),
        )
        self._known: set[tuple[str, str]] = set()

    def count(self, model: str, version: str, reason: str) -> None:
        """Count an answer; `model` and `version` are the instance's, `reason` is from a fixed list."""
        if (model, version) not in self._known:
            if len(self._known) >= MAX_VERSIONS:
                model, version = OTHER, OTHER
            self._known.add((model, version))
        self._answers.labels(model, version, reason).inc()


class GatewayMetrics:
    def __init__(self) -> None:
        self.metrics = Metrics()
        self.requests = self.metrics.counter(
            "gateway_requests",
            "Answers to requests that are forwarded, by endpoint and HTTP status",
            ("route", "status"),
        )
        self.in_flight = self.metrics.gauge("gateway_requests_in_flight", "Requests being served")
        self.disconnects = self.metrics.counter(
            "gateway_disconnects", "Clients that went away before the end"
        )
        self.limited_requests = self.metrics.counter(
            "gateway_limited_requests",
            "Refused by a limit of their API key: requests, tokens, media_bytes, concurrent_requests",
            ("limit",),
        )
        self.duration_s = self.metrics.histogram(
            "gateway_request_seconds", "Arrival to the end of the answer, whatever it is"
        )
        self.latencies = LatencyMetrics(self.metrics)
        self._count_routes()
        self.versions = VersionMetrics(self.metrics)
        self._count_items()
        self._count_routing()
        self._count_encodes()
        self._count_transfers()
        self._count_streams()
        self._count_waiting_work()
        self._count_fetches()
        self._count_files()

    def _count_routes(self) -> None:
        self.routes = self.metrics.counter(
            "gateway_routes",
            "Requests sent, by way (whole: one instance; staged: one prefills, one decodes; decode: one that "
            "decodes, alone), and why; each try counts",
            ("way", "reason"),
        )
        self.prefill_stage_s = self.metrics.histogram(
            "gateway_prefill_stage_seconds",
            "Sent to an instance that prefills, to its answer with the KV cache",
        )
        self.stage_retries = self.metrics.counter(
            "gateway_stage_retries",
            "Stages (prefill, decode) that came to nothing before the first token, by why",
            ("stage", "reason"),
        )

    def _count_items(self) -> None:
        self.items_per_request = self.metrics.histogram(
            "gateway_items_per_request",
            "Media items of a request that has some",
            ("modality",),
            buckets=NUMBER_BUCKETS,
        )
        self.item_bytes = self.metrics.histogram(
            "gateway_item_bytes", "Bytes of a media item", ("modality",), buckets=BYTES_BUCKETS
        )
        self.check_s = self.metrics.histogram(
            "gateway_item_check_seconds",
            "Base64, header and digest of a media item that a request brings",
            ("modality",),
        )
        self.items = self.metrics.counter(
            "gateway_items", "Media items: ordered, joined, sizes_known", ("how",)
        )
        self.cache_hits = self.metrics.counter(
            "gateway_cache_hits",
            "Media items known from before: their sizes in memory or redis; their tensor in the store",
            ("level",),
        )
        self.encode_decisions = self.metrics.counter(
            "gateway_encode_decisions",
            "Requests with media, by who was to encode them (remote: encoders; local: an instance), and why",
            ("way", "reason"),
        )
        self.local_encodes = self.metrics.counter(
            "gateway_local_encodes",
            "Requests sent whole to an instance with a vision tower, by why no encoder served them",
            ("reason",),
        )

    def _count_routing(self) -> None:
        self.routing_decisions = self.metrics.counter(
            "gateway_routing_decisions",
            "Choices of an instance, by stage and by the scorer that made the difference; only: there was"
            " one, equal: nothing made one, chance",
            ("stage", "reason"),
        )
        self.routing_prefix_share = self.metrics.histogram(
            "gateway_routing_prefix_share",
            "Of a prompt, what its chosen instance was sent before (choices between several)",
            buckets=SHARE_BUCKETS,
        )

    def _count_encodes(self) -> None:
        self.encodes_in_flight = self.metrics.gauge(
            "gateway_encodes_in_flight", "Items that encoders are to encode for this gateway's requests"
        )
        self.encode_s = self.metrics.histogram(
            "gateway_encode_seconds", "An item's order to its seal, as this gateway sees it"
        )
        self.encode_failures = self.metrics.counter(
            "gateway_encode_failures", "Encode jobs that failed, by why", ("kind",)
        )
        self.retries = self.metrics.counter(
            "gateway_encode_retries", "Encode jobs ordered again after a failure"
        )
        self.encode_places = self.metrics.counter(
            "gateway_encode_places", "Jobs published, by why for the encoders of that store", ("reason",)
        )
        self.jobs_dropped = self.metrics.counter(
            "gateway_encode_jobs_dropped", "Jobs taken off the queue: all their requesters had left"
        )
        self.jobs_sent_again = self.metrics.counter(
            "gateway_encode_jobs_sent_again", "Jobs sent again: Redis had lost them, or their results"
        )

    def _count_transfers(self) -> None:
        self.transfers_ordered = self.metrics.counter(
            "gateway_transfers_ordered",
            "Transfers of items between stores that were ordered, by why: new, directory, evicted, retry",
            ("reason",),
        )
        self.transfers = self.metrics.counter(
            "gateway_transfers",
            "What they came to: completed, a failure of `TransferFailureKind`, no_agent, silent, not_sent",
            ("result",),
        )
        self.transfer_s = self.metrics.histogram(
            "gateway_transfer_seconds", "A transfer's order to its end, where it completed"
        )

    def _count_streams(self) -> None:
        """Create the gauges of streams, which `encode.scrape_gauges` sets at a scrape."""
        self.redis_up = self.metrics.gauge(
            "gateway_redis_up", "Redis answered for this scrape: 1; if not, the streams' figures are missing"
        )
        self.orders_waiting = self.metrics.gauge(
            "gateway_encode_orders_waiting", "Encodes that wait at this gateway for their turn", ("class",)
        )
        self.flows_waiting = self.metrics.gauge(
            "gateway_encode_flows_waiting", "API keys, or tenants, whose encodes wait here for their turn"
        )
        self.oldest_order_s = self.metrics.gauge(
            "gateway_oldest_encode_order_seconds", "Age of the oldest encode that waits here for its turn"
        )
        self.jobs_waiting = self.metrics.gauge(
            "gateway_encode_jobs_waiting", "Jobs that no encoder has taken", ("namespace", "store")
        )
        self.jobs_pending = self.metrics.gauge(
            "gateway_encode_jobs_pending", "Jobs that encoders have in hand", ("namespace", "store")
        )
        self.oldest_job_s = self.metrics.gauge(
            "gateway_oldest_encode_job_seconds",
            "Age of the oldest job on a stream, waiting or in hand; 0: there is none",
            ("namespace", "store"),
        )
        self.results_waiting = self.metrics.gauge(
            "gateway_encode_results_waiting", "Results for this gateway that it has not handled"
        )
        self.dead_letters = self.metrics.gauge(
            "gateway_dead_letters", "Entries that no consumer could handle, of the whole deployment"
        )

    def _count_waiting_work(self) -> None:
        """Create the gauges of waiting work, which `encode.scrape_gauges` sets at a scrape."""
        self.encode_waiting_s = self.metrics.gauge(
            "gateway_encode_seconds_waiting",
            "Predicted seconds of one encoder for all items that this gateway's requests wait for",
            ("namespace",),
        )
        self.waiting_for_first_encoder = self.metrics.gauge(
            "gateway_waiting_for_first_encoder",
            "Requests that wait for an encoder in a namespace that has none",
            ("namespace",),
        )
        self.prefill_waiting_s = self.metrics.gauge(
            "gateway_prefill_seconds_waiting",
            "Seconds of one instance for the prompts of this gateway's requests that wait for their turn",
            ("model", "role"),
        )
        self.decode_waiting_s = self.metrics.gauge(
            "gateway_decode_seconds_waiting",
            "Seconds of one instance for the answers to this gateway's requests that wait for their turn",
            ("model", "role"),
        )

    def forget_waiting_work(self) -> None:
        """Clear the values of waiting work: namespaces and models come and go."""
        for gauge in (
            self.encode_waiting_s,
            self.waiting_for_first_encoder,
            self.prefill_waiting_s,
            self.decode_waiting_s,
        ):
            gauge.clear()

    def forget_streams(self) -> None:
        """Clear the values of streams: namespaces come and go."""
        for gauge in (self.jobs_waiting, self.jobs_pending, self.oldest_job_s):
            gauge.clear()
        for gauge in (self.results_waiting, self.dead_letters):
            gauge.set(math.nan)

    def _count_fetches(self) -> None:
        self.fetches = self.metrics.counter(
            "gateway_fetches",
            "Media items named by URL: fetched, joined, cached, revalidated, file; or why not: refused,"
            " too_large, failed, timeout, busy, over_limit, left",
            ("outcome",),
        )
        self.fetch_s = self.metrics.histogram(
            "gateway_fetch_seconds", "Fetch of a media item by URL, waits included", ("modality",)
        )
        self.fetch_retries = self.metrics.counter(
            "gateway_fetch_retries", "Downloads of media that were tried again"
        )
        self.fetches_in_flight = self.metrics.gauge(
            "gateway_fetches_in_flight", "Downloads of media that run, or wait for a place"
        )

    def _count_files(self) -> None:
        self.file_uploads = self.metrics.counter(
            "gateway_file_uploads", "Uploads of files: stored, refused, failed, left", ("outcome",)
        )
        self.files_stored = self.metrics.gauge(
            "gateway_files_stored", "Files in the directory, and uploads under way, over all gateways"
        )
        self.files_stored_bytes = self.metrics.gauge(
            "gateway_files_stored_bytes", "Their bytes, as after this gateway's last upload or deletion"
        )
        self.files_encoded_ahead = self.metrics.counter(
            "gateway_files_encoded_ahead",
            "Uploaded files by what became of their encode: encoded, failed; or why none was ordered:"
            " no_encoder, left (a request was first, or it was deleted), late",
            ("outcome",),
        )
