"""One encode job, from the stream to the seal.

taken -> media -> preprocessed -> reserved -> announced -> encoding -> sealed
   `-------`------------`------------`------------`------------`--> failed (one clear message)
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from triptych_common.bus import Delivery
from triptych_common.domain.errors import ItemTooLargeError, StoreError, StoreFullError
from triptych_common.domain.transports import transport_of
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata, FailureKind, Transport
from triptych_common.protocol.store import SHM, AlreadySealed, Reserved, TensorSpec
from triptych_common.telemetry import record_span, span
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import BadMediaError, Encoder, EncodeRefusedError, PreparedItem
from triptych_encoder.hand_over import HandOver
from triptych_encoder.ledger import Key, Ledger
from triptych_encoder.media_source import MediaGoneError, MediaSource
from triptych_encoder.reporter import Reporter
from triptych_vllm_connector.orders import WriteOrder

log = get_logger(__name__)

DEFAULT_DEADLINE_S = 60.0
SEAL_TIMEOUT_S = 5.0  # from the engine's answer to the store's push: a message on a local socket
MAX_RESERVE_ATTEMPTS = 5
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass
class _Failure(Exception):
    kind: FailureKind
    detail: str


class _Announcement:
    """A job's metadata, sent once: with the reservation, or before it when the store is full.

    Below the store's reserve only granted items are written, and a grant answers the metadata.
    """

    def __init__(
        self, reporter: Reporter, job: EncodeJob, envelope: Envelope, metadata: EncoderCacheMetadata
    ) -> None:
        self._reporter = reporter
        self._job = job
        self._envelope = envelope
        self._metadata = metadata
        self._is_made = False

    async def make(self, *, sealed: bool, transport: Transport = Transport.PINNED_SHM) -> None:
        """`sealed`: the entry was in the store already. `transport` is not known while the store is full."""
        if not self._is_made:
            metadata = self._metadata.model_copy(update={"sealed": sealed, "transport": transport})
            await self._reporter.metadata(self._job, self._envelope, metadata)
            self._is_made = True


class JobRunner:
    """Handles deliveries of `encode-jobs`, several at once, each `mm_hash` by one of them at a time."""

    def __init__(
        self,
        engine: Encoder,
        media: MediaSource,
        hand_over: HandOver,
        reporter: Reporter,
        ledger: Ledger,
        instance: str,
        namespace_digest: str,
        memories: Callable[[], Awaitable[list[str]]] | None = None,
    ) -> None:
        self._namespace_digest = namespace_digest
        self._engine = engine
        self._media = media
        self._hand_over = hand_over
        self._reporter = reporter
        self._ledger = ledger
        self._instance = instance
        self._memories = memories
        self._under_way: dict[str, asyncio.Lock] = {}
        self._num_waiting: dict[str, int] = {}
        self._begun: set[str] = set()  # job ids
        self.num_encodes = 0

    def has_begun(self, job_id: str) -> bool:
        """Whether the job has its blocks: it will soon be done. Before that another encoder may have it."""
        return job_id in self._begun

    async def run(self, delivery: Delivery) -> None:
        """Handle one delivery to its end, and ack it.

        Raises:
            EngineFailedError: the engine is dead; the delivery stays pending for another encoder.
        """
        envelope = delivery.envelope
        job = envelope.message
        if not isinstance(job, EncodeJob):
            await delivery.ack()
            return
        self._record_queue_time(envelope, job)
        try:
            await self._once_per_hash(job, envelope)
        except _Failure as failure:
            log.info("job failed", job_id=job.job_id, kind=failure.kind.value, detail=failure.detail)
            self._hand_over.unpin(self._ledger.dropped(job.mm_hash, _keys(job)))
            await self._reporter.failed(job, envelope, failure.kind, failure.detail)
        except asyncio.CancelledError:
            self._hand_over.unpin(self._ledger.dropped(job.mm_hash, _keys(job)))
            await delivery.hand_back()
            raise
        finally:
            self._begun.discard(job.job_id)
        await delivery.ack()

    async def give_up(self, envelope: Envelope, reason: str) -> None:
        """The job was delivered too often: tell those who wait before it goes to the dead letters."""
        if isinstance(envelope.message, EncodeJob):
            await self._reporter.failed(envelope.message, envelope, FailureKind.DEAD_LETTER, reason)

    async def _once_per_hash(self, job: EncodeJob, envelope: Envelope) -> None:
        lock = self._under_way.setdefault(job.mm_hash, asyncio.Lock())
        self._num_waiting[job.mm_hash] = self._num_waiting.get(job.mm_hash, 0) + 1
        try:
            async with lock:
                await self._encode(job, envelope)
        finally:
            self._num_waiting[job.mm_hash] -= 1
            if not self._num_waiting[job.mm_hash]:
                del self._num_waiting[job.mm_hash], self._under_way[job.mm_hash]

    async def _encode(self, job: EncodeJob, envelope: Envelope) -> None:
        prepared = await self._prepare(job, envelope)
        spec = self._spec(prepared)
        remaining_s = self._remaining_s(envelope)
        self._ledger.add(
            job.mm_hash,
            _keys(job),
            time.monotonic() + remaining_s,
        )
        announcement = _Announcement(self._reporter, job, envelope, self._metadata(job, prepared, spec))
        with span("encoder.reserve", traceparent=envelope.traceparent, attributes=self._attributes(job)):
            reservation, sealed = await self._reserve_and_watch(job, spec, announcement, remaining_s)
        self._begun.add(job.job_id)
        transport = transport_of(reservation.memory)
        await announcement.make(sealed=_is_here(sealed), transport=transport)
        started = time.monotonic()
        if isinstance(reservation, Reserved) and _is_here(sealed):  # by another encoder, since we reserved
            self._hand_over.cancel(reservation.reservation_id)
        elif isinstance(reservation, Reserved):
            order = WriteOrder(
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
            self.num_encodes += 1
            await self._run_encoder(prepared, order, sealed)
        pin_id = await self._sealed_pin(job, sealed, reservation)
        self._hand_over.unpin(self._ledger.sealed(job.mm_hash, pin_id))
        await self._reporter.completed(job, envelope, time.monotonic() - started)

    async def _prepare(self, job: EncodeJob, envelope: Envelope) -> PreparedItem:
        if job.namespace_digest not in (None, self._namespace_digest):
            raise _Failure(FailureKind.ENCODER_ERROR, "an encoder of another model or version took the job")
        if self._remaining_s(envelope) <= 0:
            raise _Failure(FailureKind.EXPIRED, "the deadline passed before the item was encoded")
        with span("encoder.preprocess", traceparent=envelope.traceparent, attributes=self._attributes(job)):
            try:
                media = await self._media.fetch(job, envelope)
                prepared = await self._engine.preprocess(job, media)
            except MediaGoneError as error:
                raise _Failure(FailureKind.MEDIA_GONE, str(error)) from error
            except BadMediaError as error:
                raise _Failure(FailureKind.BAD_MEDIA, str(error)) from error
        if prepared.num_tokens >= self._engine.max_num_tokens:
            raise _Failure(
                FailureKind.TOO_LARGE,
                f"the item needs {prepared.num_tokens} tokens; "
                f"the model takes {self._engine.max_num_tokens - 1}",
            )
        if prepared.num_embeds > self._engine.max_item_embeds:
            raise _Failure(
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
            requesters=job.requesters,
        )

    async def _reserve_and_watch(
        self, job: EncodeJob, spec: TensorSpec, announcement: "_Announcement", timeout_s: float
    ) -> tuple[Reserved | AlreadySealed, "asyncio.Future[int]"]:
        """Blocks to write, or an entry that is there; and our pin of it, once it is sealed."""
        for attempt in range(MAX_RESERVE_ATTEMPTS):
            try:
                reservation = await self._reserve(job, spec, announcement, timeout_s)
            except _Failure:
                if attempt:  # the watch of the round before
                    self._hand_over.give_up(job.mm_hash, None)
                raise
            sealed = await self._watch(job, reservation)
            if isinstance(reservation, Reserved) or sealed.done():
                return reservation, sealed
            # It was evicted between the two answers, and nobody writes it: that is for us now.
        self._hand_over.give_up(job.mm_hash, None)
        raise _Failure(FailureKind.STORE_FULL, "the cache store evicts the item as soon as it is sealed")

    async def _reserve(
        self, job: EncodeJob, spec: TensorSpec, announcement: "_Announcement", timeout_s: float
    ) -> Reserved | AlreadySealed:
        try:
            return await self._hand_over.reserve(
                job.mm_hash,
                spec,
                lambda: self._ledger.is_granted(job.mm_hash),
                lambda: announcement.make(sealed=False),
                timeout_s,
                [SHM] if self._memories is None else await self._memories(),
            )
        except StoreFullError as error:
            raise _Failure(FailureKind.STORE_FULL, "the cache store has no space") from error
        except ItemTooLargeError as error:
            raise _Failure(
                FailureKind.TOO_LARGE, "the item is larger than the cache store can hold"
            ) from error
        except StoreError as error:
            raise _Failure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}") from error

    async def _watch(self, job: EncodeJob, reservation: Reserved | AlreadySealed) -> "asyncio.Future[int]":
        try:
            return await self._hand_over.watch(job.mm_hash)
        except StoreError as error:
            self._hand_over.give_up(job.mm_hash, _reservation_id(reservation))
            raise _Failure(FailureKind.ENCODER_ERROR, f"the cache store refused: {error.code}") from error

    async def _run_encoder(
        self, prepared: PreparedItem, order: WriteOrder, sealed: "asyncio.Future[int]"
    ) -> None:
        try:
            await self._engine.encode(prepared, order)
        except EncodeRefusedError as error:
            if _is_here(sealed):  # another encoder made it meanwhile, and its pin is ours already
                self._hand_over.cancel(order.reservation_id)
                return
            self._hand_over.give_up(order.mm_hash, order.reservation_id)
            raise _Failure(FailureKind.ENCODER_ERROR, str(error)) from error

    async def _sealed_pin(
        self, job: EncodeJob, sealed: "asyncio.Future[int]", reservation: Reserved | AlreadySealed
    ) -> int:
        await asyncio.wait({sealed}, timeout=SEAL_TIMEOUT_S)
        if sealed.done() and sealed.exception() is None:
            return sealed.result()
        self._hand_over.give_up(job.mm_hash, _reservation_id(reservation))
        raise _Failure(FailureKind.ENCODER_ERROR, "the encoder's output was not written")

    def _spec(self, prepared: PreparedItem) -> TensorSpec:
        dtype = self._engine.dtype
        num_bytes = prepared.num_embeds * self._engine.width * DTYPE_BYTES[dtype]
        return TensorSpec.model_validate(
            {"shape": (prepared.num_embeds, self._engine.width), "dtype": dtype, "num_bytes": num_bytes}
        )

    def _remaining_s(self, envelope: Envelope) -> float:
        return DEFAULT_DEADLINE_S if envelope.deadline is None else envelope.deadline - time.monotonic()

    def _attributes(self, job: EncodeJob) -> dict[str, str | int]:
        return {
            "triptych.instance": self._instance,
            "triptych.mm_hash": job.mm_hash,
            "triptych.job_id": job.job_id,
        }

    def _record_queue_time(self, envelope: Envelope, job: EncodeJob) -> None:
        now_ns = time.time_ns()
        record_span(
            "queue.encode_job",
            now_ns - int(envelope.queued_s * 1e9),
            now_ns,
            traceparent=envelope.traceparent,
            attributes=self._attributes(job),
        )


def _keys(job: EncodeJob) -> set[Key]:
    return {(requester.request_id, requester.item_index) for requester in job.requesters}


def _is_here(sealed: "asyncio.Future[int]") -> bool:
    """Is the entry sealed, and pinned for us?"""
    return sealed.done() and not sealed.cancelled() and sealed.exception() is None


def _reservation_id(reservation: Reserved | AlreadySealed) -> int | None:
    return reservation.reservation_id if isinstance(reservation, Reserved) else None
