"""Metrics of the gateway (`GET /metrics`)."""

from triptych_common.telemetry.metrics import Metrics


class GatewayMetrics:
    """One object per app, with a registry of its own."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.requests = self.metrics.counter(
            "gateway_requests",
            "Answers to requests that are forwarded, by endpoint and HTTP status",
            ("route", "status"),
        )
        self.in_flight = self.metrics.gauge("gateway_requests_in_flight", "Requests being served")
        self.items = self.metrics.counter(
            "gateway_items", "Media items: ordered, joined, sizes_known", ("how",)
        )
        self.retries = self.metrics.counter(
            "gateway_encode_retries", "Encode jobs ordered again after a failure"
        )
        self.local_encodes = self.metrics.counter(
            "gateway_local_encodes",
            "Requests sent whole to an instance with a vision tower, by why no encoder served them",
            ("reason",),
        )
        self.encode_decisions = self.metrics.counter(
            "gateway_encode_decisions",
            "Requests with media, by who was to encode them (remote: encoders; local: an instance), and why",
            ("way", "reason"),
        )
        self.jobs_dropped = self.metrics.counter(
            "gateway_encode_jobs_dropped", "Jobs taken off the queue: all their requesters had left"
        )
        self.jobs_sent_again = self.metrics.counter(
            "gateway_encode_jobs_sent_again", "Jobs sent again: Redis had lost them, or their results"
        )
        self.fetches = self.metrics.counter(
            "gateway_fetches",
            "Media items named by URL: fetched, joined, cached, revalidated, file; or why not: refused,"
            " too_large, failed, timeout, busy, over_limit, left",
            ("outcome",),
        )
        self.fetch_retries = self.metrics.counter(
            "gateway_fetch_retries", "Downloads of media that were tried again"
        )
        self.fetches_in_flight = self.metrics.gauge(
            "gateway_fetches_in_flight", "Downloads of media that run, or wait for a place"
        )
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
        self.disconnects = self.metrics.counter(
            "gateway_disconnects", "Clients that went away before the end"
        )
        self.limited_requests = self.metrics.counter(
            "gateway_limited_requests",
            "Refused by a limit of their API key: requests, tokens, media_bytes, concurrent_requests",
            ("limit",),
        )
        self.first_token_s = self.metrics.histogram(
            "gateway_first_token_seconds", "Arrival to the first chunk (streamed requests)", ("media",)
        )
        self.duration_s = self.metrics.histogram(
            "gateway_request_seconds", "Arrival to the end of the answer"
        )
