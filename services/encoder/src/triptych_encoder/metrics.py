"""Metrics of the encoder, served on its host's port or socket (`docs/reference/metrics.md`)."""

from triptych_common.telemetry.metrics import NUMBER_BUCKETS, Metrics


class EncoderMetrics:
    """One object per service, with a registry of its own. Labels have values of fixed lists alone."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics()
        self.jobs = metrics.counter(
            "encoder_jobs",
            "Jobs taken, by how they ended here: completed, failed, dropped, handed_back, refused",
            ("modality", "outcome"),
        )
        self.failures = metrics.counter(
            "encoder_job_failures", "Jobs that failed, or were given up, by why", ("modality", "kind")
        )
        self.takeovers = metrics.counter(
            "encoder_takeovers", "Jobs taken that another consumer had had before"
        )
        self.spare_jobs = metrics.counter(
            "encoder_spare_jobs",
            "Jobs taken from other stores' streams: their encoders did not come for them",
        )
        self.seals = metrics.counter("encoder_seals", "Tensors that this encoder wrote and sealed")
        self.store_hits = metrics.counter(
            "encoder_store_hits", "Items not encoded: the store had them already", ("modality",)
        )
        self.media_bytes = metrics.counter(
            "encoder_media_bytes", "Bytes of media taken, as they came", ("modality",)
        )
        self.num_slots = metrics.gauge("encoder_slots", "Jobs that may be in hand at once")
        self.num_slots_used = metrics.gauge("encoder_slots_in_use", "Jobs in hand")
        self.queue_s = metrics.histogram(
            "encoder_queue_seconds", "A job's publication to its start here", ("modality",)
        )
        self.fetch_s = metrics.histogram(
            "encoder_fetch_seconds", "Media fetched from a gateway; not those that came with the job"
        )
        self.preprocess_s = metrics.histogram(
            "encoder_preprocess_seconds", "Decoding and the model's processor, with its wait", ("modality",)
        )
        self.reserve_s = metrics.histogram(
            "encoder_reserve_seconds", "Until the store had space for an item", ("modality",)
        )
        self.gate_s = metrics.histogram(
            "encoder_gate_seconds", "A prepared item's wait for its encode", ("modality",)
        )
        self.encode_s = metrics.histogram("encoder_encode_seconds", "vLLM's work on an item", ("modality",))
        self.batch_items = metrics.histogram(
            "encoder_batch_items", "Items given to vLLM at once", buckets=NUMBER_BUCKETS
        )
