"""Runs encode jobs from the stream to the seal; their states are in `active_job`.

deliver -> start again (or drop) -> fetch -> preprocess -> reserve
        -> start and announce, and meanwhile: wait at the gate (or drop) -> encode
        -> pin -> report -> ack

The first line runs ahead of the engine, for all jobs in hand at once; only a job that an encoder had before
is started there. No encode waits for the announcement, which is Redis's time, but for Redis' answer to the
start, `ASK_LIMIT_S` at most; what comes behind the encode waits for all of it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

import tenacity

from triptych_common.bus import Delivery
from triptych_common.domain.errors import StoreFullError
from triptych_common.domain.fair_queue import FairKey, slot_cost
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeJob, EncoderCacheMetadata, FailureKind
from triptych_common.protocol.store import Reserved
from triptych_common.telemetry import within_trace
from triptych_common.telemetry.logs import get_logger
from triptych_encoder.encoding import (
    LARGE_PIXELS,
    BadMediaError,
    Encoder,
    EncodeRefusedError,
    JobFailure,
    PreparedItem,
    PreprocessFailedError,
)
from triptych_encoder.jobs.active_job import ActiveJob, JobState, remaining_s
from triptych_encoder.jobs.encode_gate import EncodeGate
from triptych_encoder.jobs.gate_policy import GateItem
from triptych_encoder.jobs.held_parts import (
    HeldPart,
    HeldParts,
    ItemPart,
    hold_parts,
    item_metadata,
    parts_of,
    tensor_spec,
    write_order,
)
from triptych_encoder.jobs.job_leases import JobLeases, check_deadline
from triptych_encoder.jobs.job_telemetry import JobTelemetry
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaGoneError, MediaSource
from triptych_encoder.preprocessing.cost_budget import CostBudget
from triptych_encoder.store.store_client import StoreClient
from triptych_encoder.store.store_reservations import PinFuture, StoreReservations
from triptych_vllm_connector.host.engine_watchdog import EngineWatchdog
from triptych_vllm_connector.step_orders import WriteOrder

log = get_logger(__name__)

MAX_CAUSE_CHARS = 500
FIRST_RETRY_S = 0.02  # of a full store: space comes from other processes' pins
LONGEST_RETRY_S = 0.5  # of the item that is to be encoded next
LONGEST_RETRY_OF_OTHERS_S = 1.0  # they are not to take its space
WRITE_CHECK_S = 1.0  # for a seal, before the engine is asked whether its GPU still writes


class JobRunner:
    """Runs one namespace's jobs, several at once, but only one at a time of each `mm_hash`."""

    def __init__(
        self,
        engine: Encoder,
        watchdog: EngineWatchdog,
        gate: EncodeGate,
        prepared_pixels: CostBudget,
        media: MediaSource,
        store_client: StoreClient,
        reservations: StoreReservations,
        leases: JobLeases,
        ledger: Ledger,
        instance: str,
        namespace_digest: str,
        telemetry: JobTelemetry,
    ) -> None:
        """`prepared_pixels` limits large images from their preprocessing to the end of their encode."""
        self._engine = engine
        self._watchdog = watchdog
        self._gate = gate
        self._prepared_pixels = prepared_pixels
        self._media = media
        self._store_client = store_client
        self._reservations = reservations
        self._leases = leases
        self._ledger = ledger
        self._instance = instance
        self._namespace_digest = namespace_digest
        self._telemetry = telemetry
        self._active: dict[
            tuple[str, str], ActiveJob
        ] = {}  # by stream and entry: a job may stand there twice
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by mm_hash
        self.num_encodes = 0

    def has_blocks(self, delivery: Delivery) -> bool:
        """True if the job will soon be done here; before that another encoder may take it."""
        job = self._active.get((delivery.stream, delivery.entry_id))
        return job is not None and job.has_blocks

    async def run(self, delivery: Delivery) -> None:
        """Handle one delivery to its end, and ack it.

        Raises:
            EngineFailedError: the engine is dead, or hangs; the delivery stays pending for another encoder.
        """
        message = delivery.envelope.message
        if not isinstance(message, EncodeJob):
            await delivery.ack()
            return
        with within_trace(delivery.envelope.traceparent):
            await self._run_job(delivery, message)

    async def _run_job(self, delivery: Delivery, message: EncodeJob) -> None:
        if not self._is_ours(message):
            log.error(
                "job of another namespace refused", job_id=message.job_id, namespace=message.namespace_digest
            )
            self._telemetry.on_refused(message)
            await delivery.reject("job of another namespace than the stream's")
            return
        self._telemetry.on_taken(delivery, message)
        job: ActiveJob | None = None
        try:
            is_in_hand = message.mm_hash in self._locks
            job = await self._leases.take_job(delivery, message, is_in_hand=is_in_hand)
            if job is not None:
                self._active[delivery.stream, delivery.entry_id] = job
                await self._work_on(job)
        except asyncio.CancelledError:
            if job is not None:
                job.enter(JobState.HANDED_BACK)
            self._telemetry.on_end(message, JobState.HANDED_BACK)
            await delivery.hand_back()
            raise
        finally:
            self._active.pop((delivery.stream, delivery.entry_id), None)
        self._telemetry.on_end(message, JobState.DROPPED if job is None else job.state)
        await delivery.ack()

    async def on_dead_letter(self, envelope: Envelope, reason: str) -> None:
        """Report a job that was delivered too often, before it goes to the dead letters."""
        if isinstance(envelope.message, EncodeJob) and self._is_ours(envelope.message):
            self._telemetry.on_failed(envelope.message, FailureKind.DEAD_LETTER)
            await self._leases.fail_dead_letter(envelope.message, envelope, reason)

    async def _work_on(self, job: ActiveJob) -> None:
        mm_hash = job.job.mm_hash
        try:
            with self._leases.renewing(job):
                await self._once_per_hash(job)
        except JobFailure as failure:
            log.info(
                "job failed",
                job_id=job.job.job_id,
                kind=failure.kind.value,
                detail=failure.detail,
                cause=_cause(failure),
            )
            self._telemetry.on_failed(job.job, failure.kind)
            self._store_client.end_pins(self._ledger.remove_requesters(mm_hash, job.keys))
            await job.report_failed(failure.kind, failure.detail)
        except asyncio.CancelledError:
            self._store_client.end_pins(self._ledger.remove_requesters(mm_hash, job.keys))
            raise

    def _is_ours(self, job: EncodeJob) -> bool:
        """False for another namespace's item: its hash must not get a wrong tensor; its gateways move it."""
        return job.namespace_digest == self._namespace_digest

    async def _once_per_hash(self, job: ActiveJob) -> None:
        lock = self._locks.setdefault(job.job.mm_hash, asyncio.Lock())  # lives as long as a job has it
        async with lock:
            await self._encode(job)

    async def _encode(self, active: ActiveJob) -> None:
        job, envelope = active.job, active.envelope
        deadline = time.monotonic() + remaining_s(envelope)
        published_at, key = envelope.received_at - envelope.queued_s, FairKey(job.encode_class, job.flow)
        cost = slot_cost(job.modality, job.image)
        item = GateItem(active.waiting, published_at, deadline, key, cost)
        with self._gate.in_hand(item):
            media = await self._fetch(job, envelope)
            num_pixels = self._engine.num_pixels(job)
            async with self._prepared_pixels.hold(num_pixels if num_pixels > LARGE_PIXELS else 0):
                prepared = await self._prepare(job, envelope, media)
                del media  # it may be large, and the encode far off
                outcome = await self._reserve_and_encode(active, item, prepared)
        if outcome is None:
            return
        metadata, pin_ids, encode_s = outcome
        active.enter(JobState.SEALED)
        self._store_client.end_pins(self._ledger.hold_pins(job.mm_hash, pin_ids))
        left = await active.report_completed(metadata, deadline, encode_s)
        self._store_client.end_pins(self._ledger.remove_requesters(job.mm_hash, left))

    async def _reserve_and_encode(
        self, active: ActiveJob, item: GateItem, prepared: PreparedItem
    ) -> tuple[EncoderCacheMetadata, list[int], float] | None:
        """Metadata, pin ids of the sealed parts, and vLLM's seconds; None if the job was dropped."""
        job, envelope = active.job, active.envelope
        active.enter(JobState.PREPROCESSED)
        parts = parts_of(job, prepared, self._engine.dtype)
        spec = tensor_spec(prepared, self._engine.dtype)
        metadata = item_metadata(job, prepared, spec, self._instance, self._store_client.store)
        with self._telemetry.reserving(job, envelope):
            held = await self._reserve(active, item, metadata, parts)
        if held is None:
            self._drop(active)
            return None
        active.enter(JobState.RESERVED)
        metadata = metadata.model_copy(update={"sealed": held.is_sealed, "transport": held.transport})
        encode_s = 0.0
        try:
            async with self._announced_meanwhile(active, item, metadata):
                if not held.is_sealed:
                    encode_s = await self._encode_in_turn(active, item, held)
            if active.refusal is not None and active.state is JobState.RESERVED:
                held.give_back()
                self._drop(active)
                return None
            pin_ids = await held.wait_for_pins()
            written = [each for each in held if each.was_ordered]
            num_rows = sum(each.part.prepared.num_embeds for each in written)
            self._telemetry.on_sealed(job, len(written), num_rows, encode_s)
            return metadata, pin_ids, encode_s
        except (JobFailure, asyncio.CancelledError):
            held.give_back()
            raise

    @asynccontextmanager
    async def _announced_meanwhile(
        self, active: ActiveJob, item: GateItem, metadata: EncoderCacheMetadata
    ) -> AsyncIterator[None]:
        """Announce the item during the block, and complete that afterwards unless the block failed."""
        announcing = asyncio.get_running_loop().create_task(self._announce(active, item, metadata))
        try:
            yield
        except JobFailure:
            await asyncio.gather(announcing, return_exceptions=True)  # the failure is reported behind it
            raise
        except BaseException:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            raise
        await announcing

    async def _announce(self, active: ActiveJob, item: GateItem, metadata: EncoderCacheMetadata) -> None:
        await active.inform_requesters(metadata, item.deadline)
        self._gate.set_places(item, active.waiting)

    async def _encode_in_turn(self, active: ActiveJob, item: GateItem, held: HeldParts) -> float:
        """vLLM's seconds, or 0 if another encoder sealed the item or the job is refused."""
        announced_at = time.monotonic()
        async with self._turn(active, item, held):
            if held.is_sealed or not await self._leases.is_still_needed(active, announced_at):
                return 0.0
            encode_s = 0.0
            for each in held:  # a piece is sealed while the next one is encoded: its prefill may begin
                if each.is_sealed:
                    continue
                if each.pin.done() or not isinstance(each.reservation, Reserved):  # not ours any more
                    raise JobFailure(FailureKind.ENCODER_ERROR, "the writer went away before the encode")
                if active.state is JobState.RESERVED:
                    active.enter(JobState.ENCODING)
                    self.num_encodes += 1
                order = write_order(each.part, active.envelope.traceparent, each.reservation)
                each.was_ordered = True
                encode_s += await self._run_encoder(item, each, order)
            return encode_s

    @asynccontextmanager
    async def _turn(self, active: ActiveJob, item: GateItem, held: HeldParts) -> AsyncIterator[None]:
        """Wait for the item's turn; the block is vLLM's work on it."""
        began_ns = time.time_ns()
        num_rows = sum(each.part.prepared.num_embeds for each in held if not each.is_sealed)
        async with self._gate.turn(item, num_rows):
            self._telemetry.on_turn(active.job, active.envelope, began_ns)
            yield

    def _drop(self, active: ActiveJob) -> None:
        active.enter(JobState.DROPPED)
        if active.refusal is not None:
            self._leases.note_refused(active.job, active.refusal)
        self._store_client.end_pins(self._ledger.remove_requesters(active.job.mm_hash, active.keys))

    async def _reserve(
        self, active: ActiveJob, item: GateItem, metadata: EncoderCacheMetadata, parts: Sequence[ItemPart]
    ) -> HeldParts | None:
        """Reserve the parts, retrying a full store until the deadline; None if the job is refused meanwhile.

        The item is announced meanwhile: below the store's reserve only granted items are written, and a grant
        answers the metadata. The item that is to be encoded next asks most often: items reserved ahead of
        their encode must not take what becomes free.
        """

        def wait(state: tenacity.RetryCallState) -> float:
            longest_s = LONGEST_RETRY_S if self._gate.is_next(item) else LONGEST_RETRY_OF_OTHERS_S
            return wait_for_space(state, longest_s)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(StoreFullError),
            wait=wait,
            stop=tenacity.stop_before_delay(item.deadline - time.monotonic()),
            reraise=True,
        )
        try:
            return await retrying(self._try_reserve, active, metadata, parts, item.deadline)
        except StoreFullError as error:
            raise JobFailure(FailureKind.STORE_FULL, "the cache store has no space") from error

    async def _try_reserve(
        self, active: ActiveJob, metadata: EncoderCacheMetadata, parts: Sequence[ItemPart], deadline: float
    ) -> HeldParts | None:
        is_granted = self._ledger.is_granted(active.job.mm_hash)
        try:
            return await hold_parts(
                parts, self._reservations, self._store_client, is_granted=is_granted, deadline=deadline
            )
        except StoreFullError:
            await active.inform_requesters(metadata, deadline)
            if active.refusal is not None:
                return None
            raise

    async def _fetch(self, job: EncodeJob, envelope: Envelope) -> bytes:
        """Fetch the media, before the item takes a share of the pixels: a gateway may hang."""
        check_deadline(envelope)
        with self._telemetry.fetching(job, envelope):
            try:
                media = await self._media.fetch(job, envelope)
            except MediaGoneError as error:
                raise JobFailure(FailureKind.MEDIA_GONE, str(error)) from error
        self._telemetry.on_media(job, media)
        return media

    async def _prepare(self, job: EncodeJob, envelope: Envelope, media: bytes) -> PreparedItem:
        check_deadline(envelope)
        with self._telemetry.preprocessing(job, envelope):
            try:
                prepared = await self._engine.preprocess(job, media)
            except BadMediaError as error:
                raise JobFailure(FailureKind.BAD_MEDIA, str(error)) from error
            except PreprocessFailedError as error:
                raise JobFailure(FailureKind.ENCODER_ERROR, str(error)) from error
        self._telemetry.on_prepared(job, prepared)
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

    async def _run_encoder(self, item: GateItem, held: HeldPart, order: WriteOrder) -> float:
        """Encode one part; returns the seconds until its seal.

        A GPU may write and seal after the engine's answer: until then the item is in work. A seal that only
        the store keeps back is none of the engine's.
        """
        began_at = time.monotonic()
        try:
            async with self._watchdog.waiting():
                await self._engine.encode(held.part.prepared, order)
                while not await is_settled(held.pin, WRITE_CHECK_S) and await self._engine.is_writing():
                    pass
        except EncodeRefusedError as error:
            if held.is_sealed:  # another encoder made it meanwhile, and the pin of its entry is ours already
                self._store_client.cancel_reservation(order.reservation_id)
            else:
                self._store_client.unwatch_item(order.mm_hash, order.reservation_id)
                held.is_given_up = True
                raise JobFailure(FailureKind.ENCODER_ERROR, str(error)) from error
        return self._gate.on_answer(item, began_at)


async def is_settled(pin: PinFuture, timeout_s: float) -> bool:
    """True if the seal, or its failure, comes within `timeout_s`."""
    done, _ = await asyncio.wait({pin}, timeout=timeout_s)
    return bool(done)


def wait_for_space(state: tenacity.RetryCallState, longest_s: float) -> float:
    """Seconds to wait; random, so that two encoders with part of what both need do not stay in step."""
    shortest_s = FIRST_RETRY_S / 2
    return tenacity.wait_random_exponential(FIRST_RETRY_S, max=longest_s, min=shortest_s)(state)


def _cause(failure: JobFailure) -> str | None:
    """Library's own error, for the log only: the caller gets `failure.detail`."""
    error = failure.__cause__
    return (
        repr(error.__cause__)[:MAX_CAUSE_CHARS] if error is not None and error.__cause__ is not None else None
    )
