"""Metrics of the encoder, served on its host's port or socket (`docs/reference/metrics.md`)."""

from triptych_common.telemetry.metrics import BYTES_BUCKETS, NUMBER_BUCKETS, Metrics


class EncoderMetrics:
    """Metrics of one encoder, with their own registry; label values come from fixed lists."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics()
        self.jobs = metrics.counter(
            "encoder_jobs",
            "Jobs taken, by outcome: completed, failed, dropped, handed_back, refused",
            ("modality", "outcome"),
        )
        self.failures = metrics.counter(
            "encoder_job_failures", "Jobs that failed, by kind of failure", ("modality", "kind")
        )
        self.takeovers = metrics.counter("encoder_takeovers", "Jobs taken over from another encoder")
        self.spare_jobs = metrics.counter(
            "encoder_spare_jobs", "Jobs taken from other stores' streams, whose encoders had no free slot"
        )
        self.seals = metrics.counter("encoder_seals", "Tensors that this encoder wrote and sealed")
        self.store_hits = metrics.counter(
            "encoder_store_hits", "Items not encoded because the store had them", ("modality",)
        )
        self.media_bytes = metrics.counter(
            "encoder_media_bytes", "Bytes of media received, as encoded by the caller", ("modality",)
        )
        self.num_slots = metrics.gauge("encoder_slots", "Jobs that may be in hand at once")
        self.num_slots_used = metrics.gauge("encoder_slots_in_use", "Jobs in hand")
        self.queue_s = metrics.histogram(
            "encoder_queue_seconds", "Seconds from a job's publication to its start here", ("modality",)
        )
        self.fetch_s = metrics.histogram(
            "encoder_fetch_seconds",
            "Seconds to fetch media from a gateway; media inside jobs do not count",
            ("modality",),
        )
        self.item_bytes = metrics.histogram(
            "encoder_item_bytes", "Bytes of an item's media", ("modality",), buckets=BYTES_BUCKETS
        )
        self.decode_s = metrics.histogram(
            "encoder_decode_seconds", "Seconds of decoding an item's media, without waits", ("modality",)
        )
        self.preprocess_s = metrics.histogram(
            "encoder_preprocess_seconds",
            "Seconds of decoding and the model's processor, waits included",
            ("modality",),
        )
        self.reserve_s = metrics.histogram(
            "encoder_reserve_seconds", "Seconds until the store had space for an item", ("modality",)
        )
        self.gate_s = metrics.histogram(
            "encoder_gate_seconds", "Seconds that a prepared item waited for its encode", ("modality",)
        )
        self.encode_s = metrics.histogram(
            "encoder_encode_seconds", "Seconds of vLLM's work on an item", ("modality",)
        )
        self.batch_items = metrics.histogram(
            "encoder_batch_items", "Items given to vLLM at once", buckets=NUMBER_BUCKETS
        )
