"""One encode job, from the stream to the seal.

taken -> started -> media -> preprocessed -> reserved -> announced -> encoding -> sealed
   |         `--------`------------`------------`------------`------------`--> failed (one clear message)
   `--> dropped (nobody waits for it any more, or another encoder works on it)
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from triptych_common.bus import Delivery
from triptych_common.domain.transports import transport_of
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata, FailureKind
from triptych_common.protocol.store import Reserved, TensorSpec
from triptych_common.telemetry import record_span, span
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.engine.encoding import (
    BadMediaError,
    Encoder,
    EncodeRefusedError,
    JobFailure,
    PreparedItem,
    PreprocessFailedError,
)
from triptych_encoder.engine.engine_watchdog import EngineWatchdog
from triptych_encoder.jobs.flight import Flight
from triptych_encoder.jobs.job_leases import JobLeases, remaining_s
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaGoneError, MediaSource
from triptych_encoder.store.store_client import StoreClient
from triptych_encoder.store.store_reservations import StoreReservations, is_here
from triptych_vllm_connector.step_orders import WriteOrder

log = get_logger(__name__)

MAX_CAUSE_CHARS = 500
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class JobRunner:
    """Handles one namespace's jobs, several at once, each `mm_hash` by one of them at a time."""

    def __init__(
        self,
        engine: Encoder,
        media: MediaSource,
        hand_over: StoreClient,
        flights: JobLeases,
        ledger: Ledger,
        instance: str,
        namespace_digest: str,
        memories: Callable[[], Awaitable[list[str]]] | None = None,
        engine_timeout_s: float = 60.0,
    ) -> None:
        self._namespace_digest = namespace_digest
        self._engine = engine
        self._media = media
        self._hand_over = hand_over
        self._placing = StoreReservations(hand_over, ledger, memories)
        self._flights = flights
        self._ledger = ledger
        self._instance = instance
        self._patience = EngineWatchdog(engine_timeout_s)
        self._under_way: dict[str, asyncio.Lock] = {}
        self._num_waiting: dict[str, int] = {}
        self._begun: set[str] = set()  # entry ids: a job may stand on the stream twice
        self.num_encodes = 0

    def has_begun(self, delivery: Delivery) -> bool:
        """Whether the job has its blocks: it will soon be done. Before that another encoder may have it."""
        return delivery.entry_id in self._begun

    async def run(self, delivery: Delivery) -> None:
        """Handle one delivery to its end, and ack it.

        Raises:
            EngineFailedError: the engine is dead, or hangs; the delivery stays pending for another encoder.
        """
        envelope = delivery.envelope
        job = envelope.message
        if not isinstance(job, EncodeJob):
            await delivery.ack()
            return
        if not self._is_ours(job):
            log.error("job of another namespace refused", job_id=job.job_id, namespace=job.namespace_digest)
            await delivery.reject("job of another namespace than the stream's")
            return
        self._record_queue_time(delivery, job)
        try:
            flight = await self._flights.start(delivery, job)
            if flight is not None:
                await self._work(flight)
        except asyncio.CancelledError:
            await delivery.hand_back()
            raise
        finally:
            self._begun.discard(delivery.entry_id)
        await delivery.ack()

    async def _work(self, flight: Flight) -> None:
        job = flight.job
        try:
            with self._flights.working_on(flight):
                await self._once_per_hash(flight)
        except JobFailure as failure:
            log.info(
                "job failed",
                job_id=job.job_id,
                kind=failure.kind.value,
                detail=failure.detail,
                cause=_cause(failure),
            )
            self._hand_over.unpin(self._ledger.dropped(job.mm_hash, flight.keys))
            await self._flights.fail(flight, failure.kind, failure.detail)
        except asyncio.CancelledError:
            self._hand_over.unpin(self._ledger.dropped(job.mm_hash, flight.keys))
            raise

    async def give_up(self, envelope: Envelope, reason: str) -> None:
        """The job was delivered too often: tell those who wait before it goes to the dead letters."""
        if isinstance(envelope.message, EncodeJob) and self._is_ours(envelope.message):
            await self._flights.give_up(envelope.message, envelope, reason)

    def _is_ours(self, job: EncodeJob) -> bool:
        """Another namespace's item is not touched: no wrong tensor may stand under its hash, and its flight
        goes on. Its gateways see that the job is not on the stream where it belongs, and send it there.
        """
        return job.namespace_digest == self._namespace_digest

    async def _once_per_hash(self, flight: Flight) -> None:
        mm_hash = flight.job.mm_hash
        lock = self._under_way.setdefault(mm_hash, asyncio.Lock())
        self._num_waiting[mm_hash] = self._num_waiting.get(mm_hash, 0) + 1
        try:
            async with lock:
                await self._encode(flight)
        finally:
            self._num_waiting[mm_hash] -= 1
            if not self._num_waiting[mm_hash]:
                del self._num_waiting[mm_hash], self._under_way[mm_hash]

    async def _encode(self, flight: Flight) -> None:
        job, envelope = flight.job, flight.envelope
        prepared = await self._prepare(job, envelope)
        spec = self._spec(prepared)
        metadata, left_s = self._metadata(job, prepared, spec), remaining_s(envelope)
        deadline = time.monotonic() + left_s
        with span("encoder.reserve", traceparent=envelope.traceparent, attributes=self._attributes(job)):
            # Below the store's reserve only granted items are written, and a grant answers the metadata.
            reservation, sealed = await self._placing.reserve(
                job.mm_hash, spec, lambda: flight.announce(metadata, deadline), left_s
            )
        self._begun.add(flight.entry_id)
        metadata = metadata.model_copy(
            update={"sealed": is_here(sealed), "transport": transport_of(reservation.memory)}
        )
        await flight.announce(metadata, deadline)
        started = time.monotonic()
        if isinstance(reservation, Reserved) and is_here(sealed):  # by another encoder, since we reserved
            self._hand_over.cancel(reservation.reservation_id)
        elif isinstance(reservation, Reserved):
            self.num_encodes += 1
            await self._run_encoder(prepared, self._order(job, envelope, prepared, spec, reservation), sealed)
        pin_id = await self._placing.sealed_pin(job.mm_hash, sealed, reservation)
        self._hand_over.unpin(self._ledger.sealed(job.mm_hash, pin_id))
        left = await flight.complete(metadata, deadline, time.monotonic() - started)
        for key in left:
            self._hand_over.unpin(self._ledger.settled(job.mm_hash, key))

    def _order(
        self,
        job: EncodeJob,
        envelope: Envelope,
        prepared: PreparedItem,
        spec: TensorSpec,
        reservation: Reserved,
    ) -> WriteOrder:
        return WriteOrder(
            mm_hash=job.mm_hash,
            job_id=job.job_id,
            reservation_id=reservation.reservation_id,
            offset=reservation.offset,
            num_embeds=prepared.num_embeds,
            width=self._engine.width,
            dtype=spec.dtype,
            traceparent=envelope.traceparent,
            generation=reservation.generation,
            memory=reservation.memory,
        )

    async def _prepare(self, job: EncodeJob, envelope: Envelope) -> PreparedItem:
        if remaining_s(envelope) <= 0:
            raise JobFailure(FailureKind.EXPIRED, "the deadline passed before the item was encoded")
        with span("encoder.preprocess", traceparent=envelope.traceparent, attributes=self._attributes(job)):
            try:
                media = await self._media.fetch(job, envelope)
                prepared = await self._engine.preprocess(job, media)
            except MediaGoneError as error:
                raise JobFailure(FailureKind.MEDIA_GONE, str(error)) from error
            except BadMediaError as error:
                raise JobFailure(FailureKind.BAD_MEDIA, str(error)) from error
            except PreprocessFailedError as error:
                raise JobFailure(FailureKind.ENCODER_ERROR, str(error)) from error
        if prepared.num_tokens >= self._engine.max_num_tokens:
            raise JobFailure(
                FailureKind.TOO_LARGE,
                f"the item needs {prepared.num_tokens} tokens; "
                f"the model takes {self._engine.max_num_tokens - 1}",
            )
        if prepared.num_embeds > self._engine.max_item_embeds:
            raise JobFailure(
                FailureKind.TOO_LARGE,
                f"the item needs {prepared.num_embeds} rows; "
                f"the encoder takes {self._engine.max_item_embeds}",
            )
        return prepared

    def _metadata(self, job: EncodeJob, prepared: PreparedItem, spec: TensorSpec) -> EncoderCacheMetadata:
        return EncoderCacheMetadata(
            job_id=job.job_id,
            mm_hash=job.mm_hash,
            modality=job.modality,
            num_embeds=prepared.num_embeds,
            width=self._engine.width,
            dtype=spec.dtype,
            num_bytes=spec.num_bytes,
            placeholder_metadata=prepared.placeholder_metadata,
            encoder=self._instance,
            store=self._hand_over.store,
            sealed=False,
            requesters=(),
        )

    async def _run_encoder(
        self, prepared: PreparedItem, order: WriteOrder, sealed: "asyncio.Future[int]"
    ) -> None:
        try:
            async with self._patience.with_job():
                await self._engine.encode(prepared, order)
        except EncodeRefusedError as error:
            if is_here(sealed):  # another encoder made it meanwhile, and its pin is ours already
                self._hand_over.cancel(order.reservation_id)
                return
            self._hand_over.give_up(order.mm_hash, order.reservation_id)
            raise JobFailure(FailureKind.ENCODER_ERROR, str(error)) from error

    def _spec(self, prepared: PreparedItem) -> TensorSpec:
        dtype = self._engine.dtype
        num_bytes = prepared.num_embeds * self._engine.width * DTYPE_BYTES[dtype]
        return TensorSpec.model_validate(
            {"shape": (prepared.num_embeds, self._engine.width), "dtype": dtype, "num_bytes": num_bytes}
        )

    def _attributes(self, job: EncodeJob) -> dict[str, str | int]:
        return {
            "triptych.instance": self._instance,
            "triptych.mm_hash": job.mm_hash,
            "triptych.job_id": job.job_id,
        }

    def _record_queue_time(self, delivery: Delivery, job: EncodeJob) -> None:
        envelope, num_deliveries = delivery.envelope, delivery.num_deliveries
        if num_deliveries > 1:
            log.info("job taken over", job_id=job.job_id, num_deliveries=num_deliveries)
        now_ns = time.time_ns()
        record_span(
            "queue.encode_job",
            now_ns - int(envelope.queued_s * 1e9),
            now_ns,
            traceparent=envelope.traceparent,
            attributes=self._attributes(job) | {"triptych.num_deliveries": num_deliveries},
        )


def _cause(failure: JobFailure) -> str | None:
    """What a library said of it, for the log alone: the caller is told `failure.detail`."""
    error = failure.__cause__
    return (
        repr(error.__cause__)[:MAX_CAUSE_CHARS] if error is not None and error.__cause__ is not None else None
    )
