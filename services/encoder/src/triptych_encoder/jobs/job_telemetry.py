"""Spans of a job's stages, in the job's own trace, and its metrics."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import Histogram

from triptych_common.bus import Delivery
from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob, FailureKind
from triptych_common.telemetry import record_span, span
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import PreparedItem
from triptych_encoder.jobs.active_job import JobState
from triptych_encoder.metrics import EncoderMetrics

MIN_ENCODES = 4  # the first ones take longer
FADE = 0.9  # of what was known, with each encode
CHANGE = 1.25
ANNOUNCE_S = 5.0

log = get_logger(__name__)

REFUSED = "refused"  # no job of this encoder's at all: it is of another namespace


class EncodeSpeed:
    """Measured speed of one encoder, used in one event loop; `run` announces it.

    It is in seconds for a row, and announced when it has changed by `CHANGE`: noise is not announced.
    """

    def __init__(self) -> None:
        self._num_encodes = 0
        self._rows = 0.0
        self._seconds = 0.0
        self._announced: float | None = None

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record vLLM's seconds for an item of `num_rows` rows."""
        if num_rows <= 0 or seconds <= 0:
            return
        self._num_encodes += 1
        if self._num_encodes > 1:
            self._rows = FADE * self._rows + num_rows
            self._seconds = FADE * self._seconds + seconds

    @property
    def row_s(self) -> float | None:
        """Seconds for a row; None until measured."""
        return self._seconds / self._rows if self._num_encodes >= MIN_ENCODES else None

    def poll_change(self) -> float | None:
        """Value to announce; None if it has not changed enough."""
        row_s, known = self.row_s, self._announced
        if row_s is None or (known is not None and known / CHANGE < row_s < known * CHANGE):
            return None
        self._announced = row_s
        return row_s

    async def run(self, registration: Registration) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            if (row_s := self.poll_change()) is not None:
                try:
                    await registration.update(row_s=row_s)
                except BusUnavailableError as error:
                    log.info("encoder's speed not announced yet", error=str(error))


class JobTelemetry:
    def __init__(self, instance: str, metrics: EncoderMetrics, speed: EncodeSpeed, own_stream: str) -> None:
        self._instance = instance
        self._own_stream = own_stream
        self._metrics = metrics
        self._speed = speed

    # ---- a job's beginning and end ---------------------------------------------------------------
    def on_taken(self, delivery: Delivery, job: EncodeJob) -> None:
        envelope, num_deliveries = delivery.envelope, delivery.num_deliveries
        self._metrics.queue_s.labels(job.modality.value).observe(envelope.queued_s)
        if delivery.stream != self._own_stream:
            self._metrics.spare_jobs.inc()
        if num_deliveries > 1:
            self._metrics.takeovers.inc()
            log.info("job taken over", job_id=job.job_id, num_deliveries=num_deliveries)
        now_ns = time.time_ns()
        record_span(
            "queue.encode_job",
            now_ns - int(envelope.queued_s * 1e9),
            now_ns,
            traceparent=envelope.traceparent,
            attributes=self._attributes(job)
            | {"triptych.num_deliveries": num_deliveries, "triptych.taken_from": delivery.stream},
        )

    def on_end(self, job: EncodeJob, state: JobState) -> None:
        self._count_end(job, state.value.replace(" ", "_"))

    def on_refused(self, job: EncodeJob) -> None:
        self._count_end(job, REFUSED)

    def on_failed(self, job: EncodeJob, kind: FailureKind) -> None:
        self._metrics.failures.labels(job.modality.value, kind.value).inc()

    def _count_end(self, job: EncodeJob, outcome: str) -> None:
        self._metrics.jobs.labels(job.modality.value, outcome).inc()

    # ---- its stages ------------------------------------------------------------------------------
    @contextmanager
    def fetching(self, job: EncodeJob, envelope: Envelope) -> Iterator[None]:
        """Time the fetch of the media in the block, unless they came with the job."""
        with self._span("encoder.fetch", job, envelope):
            if envelope.blob is not None:
                yield
            else:
                with self._metrics.fetch_s.labels(job.modality.value).time():
                    yield

    def on_media(self, job: EncodeJob, media: bytes) -> None:
        self._metrics.media_bytes.labels(job.modality.value).inc(len(media))
        self._metrics.item_bytes.labels(job.modality.value).observe(len(media))

    @contextmanager
    def preprocessing(self, job: EncodeJob, envelope: Envelope) -> Iterator[None]:
        """Time the decoding and the model's processor in the block."""
        with self._timed_span("encoder.preprocess", self._metrics.preprocess_s, job, envelope):
            yield

    def on_prepared(self, job: EncodeJob, prepared: PreparedItem) -> None:
        """Record how long a preprocessed item's media took to decode."""
        self._metrics.decode_s.labels(job.modality.value).observe(prepared.decode_s)

    @contextmanager
    def reserving(self, job: EncodeJob, envelope: Envelope) -> Iterator[None]:
        """Time the wait for space in the store."""
        with self._timed_span("encoder.reserve", self._metrics.reserve_s, job, envelope):
            yield

    def on_turn(self, job: EncodeJob, envelope: Envelope, began_ns: int) -> None:
        """Record the wait at the gate, since `began_ns` (wall clock)."""
        now_ns = time.time_ns()
        self._metrics.gate_s.labels(job.modality.value).observe(max(now_ns - began_ns, 0) / 1e9)
        record_span(
            "encoder.gate",
            began_ns,
            now_ns,
            traceparent=envelope.traceparent,
            attributes=self._attributes(job),
        )

    def on_sealed(self, job: EncodeJob, num_written: int, num_rows: int, encode_s: float) -> None:
        """Record a sealed item, of which this encoder wrote `num_written` parts in `encode_s`."""
        if not num_written:
            self._metrics.store_hits.labels(job.modality.value).inc()
            return
        self._metrics.seals.inc(num_written)
        self._metrics.encode_s.labels(job.modality.value).observe(encode_s)
        self._speed.observe(num_rows, encode_s)

    @contextmanager
    def _timed_span(
        self, name: str, seconds: Histogram, job: EncodeJob, envelope: Envelope
    ) -> Iterator[None]:
        with self._span(name, job, envelope), seconds.labels(job.modality.value).time():
            yield

    @contextmanager
    def _span(self, name: str, job: EncodeJob, envelope: Envelope) -> Iterator[None]:
        with span(name, traceparent=envelope.traceparent, attributes=self._attributes(job)):
            yield

    def _attributes(self, job: EncodeJob) -> dict[str, str | int]:
        return {
            "triptych.instance": self._instance,
            "triptych.mm_hash": job.mm_hash,
            "triptych.job_id": job.job_id,
        }
