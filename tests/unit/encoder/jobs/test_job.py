"""One encode job from delivery to ack, with fakes of engine, store and bus. No vLLM."""

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.support.flight_model import FlightModel, JobsModel
from triptych_common.coordination import ClaimResult, StartResult
from triptych_common.domain.errors import (
    BusUnavailableError,
    ItemTooLargeError,
    StoreError,
    StoreFullError,
)
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    Modality,
    Requester,
)
from triptych_common.protocol.store import AlreadySealed, Reserved, TensorSpec
from triptych_encoder.engine.encoding import (
    BadMediaError,
    EncodeRefusedError,
    EngineFailedError,
    PreparedItem,
    PreprocessFailedError,
)
from triptych_encoder.engine.engine_watchdog import EngineWatchdog
from triptych_encoder.jobs.job import JobRunner
from triptych_encoder.jobs.job_leases import JobLeases
from triptych_encoder.jobs.ledger import Ledger
from triptych_encoder.jobs.media_source import MediaSource
from triptych_encoder.store import store_reservations as module
from triptych_vllm_connector.step_orders import WriteOrder

HASH = "a" * 64
DIGEST = "d" * 64
ANOTHER = "e" * 64
MEDIA = b"media"


@dataclass
class FakeDelivery:
    """`Delivery`."""

    envelope: Envelope
    entry_id: str = "1-1"
    num_deliveries: int = 1
    num_acks: int = 0
    num_hand_backs: int = 0
    rejected: list[str] = field(default_factory=list)

    async def reject(self, reason: str) -> None:
        self.rejected.append(reason)

    async def ack(self) -> None:
        self.num_acks += 1

    async def hand_back(self) -> None:
        self.num_hand_backs += 1


@dataclass
class FakeEngine:
    """`Encoder`: rows as told; `on_encode` is what its worker does, by default it writes and seals."""

    on_encode: Callable[[WriteOrder], Awaitable[None]]
    width: int = 4
    dtype: str = "float32"
    max_num_tokens: int = 100
    max_item_embeds: int = 50
    num_embeds: int = 3
    preprocess_error: Exception | None = None
    orders: list[WriteOrder] = field(default_factory=list)

    async def preprocess(self, job: EncodeJob, media: bytes) -> PreparedItem:
        if self.preprocess_error is not None:
            raise self.preprocess_error
        assert media == MEDIA
        return PreparedItem({}, self.num_embeds, self.num_embeds + 2, {"image_grid_thw": [1, 2, 2]})

    async def encode(self, prepared: PreparedItem, order: WriteOrder) -> None:
        self.orders.append(order)
        await self.on_encode(order)


class FakeHandOver:
    """`StoreClient`: a store of one item. `answers` to `reserve` come in order; then a reservation each."""

    store = "store-0"

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.is_sealed = False
        self.watch_error: StoreError | None = None
        self.futures: list[asyncio.Future[int]] = []
        self.unpinned: list[int] = []
        self.given_up: list[tuple[str, int | None]] = []
        self.cancelled: list[int] = []
        self.num_reservations = 0
        self.num_pins = 0

    async def reserve(
        self,
        mm_hash: str,
        spec: TensorSpec,
        is_granted: Callable[[], bool],
        on_full: Callable[[], Awaitable[None]],
        timeout_s: float,
        memories: Sequence[str],
    ) -> Reserved | AlreadySealed:
        while self.answers:
            answer = self.answers.pop(0)
            if answer == "full":
                await on_full()
                continue
            if isinstance(answer, Exception):
                raise answer
            return AlreadySealed(seq=1, spec=spec)
        if self.is_sealed:
            return AlreadySealed(seq=1, spec=spec)
        self.num_reservations += 1
        return Reserved(seq=1, reservation_id=self.num_reservations, offset=0, generation=1)

    async def watch(self, mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        if self.watch_error is not None:
            raise self.watch_error
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.futures.append(future)
        if self.is_sealed:
            self.pin(future)
        return future

    def pin(self, future: "asyncio.Future[int]") -> None:
        self.num_pins += 1
        future.set_result(self.num_pins)

    async def seal(self, order: WriteOrder) -> None:
        self.is_sealed = True
        for future in self.futures:
            if not future.done():
                self.pin(future)

    def unpin(self, pin_ids: list[int]) -> None:
        self.unpinned += pin_ids

    def give_up(self, mm_hash: str, reservation_id: int | None) -> None:
        self.given_up.append((mm_hash, reservation_id))
        self.futures.clear()

    def cancel(self, reservation_id: int) -> None:
        self.cancelled.append(reservation_id)


class FakeReporter:
    """`Reporter`: remembers."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.error: Exception | None = None

    async def metadata(self, metadata: EncoderCacheMetadata, envelope: Envelope) -> None:
        self._say(metadata)

    async def completed(
        self, job: EncodeJob, envelope: Envelope, encode_s: float, requesters: Iterable[Requester]
    ) -> None:
        if list(requesters):
            self._say(EncodeCompleted(job_id=job.job_id, mm_hash=job.mm_hash, encoder="e", encode_s=encode_s))

    async def failed(
        self, failure: EncodeFailed, envelope: Envelope, requesters: Iterable[Requester]
    ) -> None:
        if list(requesters):
            self._say((failure.job_id, failure.kind, failure.detail))

    def _say(self, what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.said.append(what)

    @property
    def kinds(self) -> list[Any]:
        return [each[1] if isinstance(each, tuple) else each.TYPE for each in self.said]


class Bench:
    """A job runner and its fakes."""

    def __init__(self) -> None:
        self.hand_over, self.reporter, self.ledger = FakeHandOver(), FakeReporter(), Ledger()
        self.jobs = JobsModel()
        self.inflight = FlightModel(self.jobs)
        self.engine = FakeEngine(self.hand_over.seal)
        self.media = MediaSource(
            httpx.AsyncClient(transport=httpx.MockTransport(lambda request: httpx.Response(404))), 1000
        )
        self.runner = JobRunner(
            self.engine,
            self.media,
            self.hand_over,  # type: ignore[arg-type]
            JobLeases(self.inflight, self.reporter, self.ledger, "encoder-0", 2.0),  # type: ignore[arg-type]
            self.ledger,
            "encoder-0",
            DIGEST,
        )

    def publish(self, delivery: FakeDelivery) -> None:
        """The job stands on the stream."""
        if isinstance(delivery.envelope.message, EncodeJob):
            self.jobs.stream.setdefault(delivery.entry_id, delivery.envelope.message)

    async def run(self, delivery: FakeDelivery) -> None:
        self.publish(delivery)
        await asyncio.wait_for(self.runner.run(delivery), 5)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def requester(request_id: str) -> Requester:
    return Requester(request_id=request_id, item_index=0, gateway="g-0", prefill_decode="pd-0")


def delivery_of(
    job_id: str = "job-1",
    request_id: str = "req-1",
    remaining_ms: int | None = 10_000,
    blob: bytes | None = MEDIA,
    namespace_digest: str = DIGEST,
) -> FakeDelivery:
    job = EncodeJob(
        job_id=job_id,
        mm_hash=HASH,
        modality=Modality.IMAGE,
        media_num_bytes=len(MEDIA),
        media_url=None if blob else "http://gateway/media",
        requesters=(requester(request_id),),
        namespace_digest=namespace_digest,
    )
    return FakeDelivery(Envelope(job, blob=blob, remaining_ms=remaining_ms, received_at=time.monotonic()))


async def test_the_whole_way(bench: Bench) -> None:
    delivery = delivery_of()
    await bench.run(delivery)
    metadata, completed = bench.reporter.said
    assert (metadata.num_embeds, metadata.width, metadata.dtype, metadata.num_bytes) == (3, 4, "float32", 48)
    assert (metadata.encoder, metadata.store, metadata.sealed) == ("encoder-0", "store-0", False)
    assert metadata.placeholder_metadata == {"image_grid_thw": [1, 2, 2]}
    assert completed.TYPE == "EncodeCompleted"
    (order,) = bench.engine.orders
    assert (order.mm_hash, order.job_id, order.reservation_id, order.num_embeds) == (HASH, "job-1", 1, 3)
    assert delivery.num_acks == 1
    assert bench.hand_over.unpinned == []  # the pin waits for the consumer
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]
    assert bench.runner.num_encodes == 1


async def test_the_consumers_hear_before_anything_is_encoded(bench: Bench) -> None:
    kinds_at_encode: list[Any] = []

    async def on_encode(order: WriteOrder) -> None:
        kinds_at_encode.extend(bench.reporter.kinds)
        await bench.hand_over.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of())
    assert kinds_at_encode == ["EncoderCacheMetadata"]


async def test_an_item_that_is_there_is_not_encoded_again(bench: Bench) -> None:
    bench.hand_over.is_sealed = True
    await bench.run(delivery_of())
    assert bench.engine.orders == []
    assert [message.TYPE for message in bench.reporter.said] == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.reporter.said[0].sealed
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]


async def test_who_answered_before_the_seal_is_not_waited_for(bench: Bench) -> None:
    async def on_encode(order: WriteOrder) -> None:
        assert bench.ledger.settled(HASH, ("req-1", 0)) == []
        await bench.hand_over.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of())
    assert bench.hand_over.unpinned == [1]
    assert len(bench.ledger) == 0


async def test_a_full_store_is_announced_and_waited_for(bench: Bench) -> None:
    """The consumer's grant opens the store's reserve, and it grants what it has heard of."""
    bench.hand_over.answers = ["full", "full"]
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_an_entry_evicted_before_it_could_be_pinned_is_encoded(bench: Bench) -> None:
    bench.hand_over.answers = ["already sealed"]
    await bench.run(delivery_of())
    assert len(bench.engine.orders) == 1
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_an_entry_that_is_evicted_again_and_again_fails_the_job(bench: Bench) -> None:
    bench.hand_over.answers = ["already sealed"] * 100
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.STORE_FULL]
    assert bench.hand_over.given_up == [(HASH, None)]


# ---- failures ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (StoreFullError("full", ""), FailureKind.STORE_FULL),
        (ItemTooLargeError("too_large", ""), FailureKind.TOO_LARGE),
        (StoreError("internal", "secret path"), FailureKind.ENCODER_ERROR),
    ],
)
async def test_a_store_that_refuses(bench: Bench, error: StoreError, kind: FailureKind) -> None:
    bench.hand_over.answers = [error]
    delivery = delivery_of()
    await bench.run(delivery)
    assert bench.reporter.kinds == [kind]
    assert "secret" not in bench.reporter.said[0][2]
    assert delivery.num_acks == 1
    assert bench.engine.orders == []
    assert len(bench.ledger) == 0


async def test_want_of_memory_is_not_final_and_what_a_library_said_is_logged(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.engine.preprocess_error = PreprocessFailedError("no resources")
    bench.engine.preprocess_error.__cause__ = MemoryError("words of a library")
    with caplog.at_level(logging.INFO):
        await bench.run(delivery_of())
    assert bench.reporter.said == [("job-1", FailureKind.ENCODER_ERROR, "no resources")]
    (failed,) = (record for record in caplog.records if record.message == "job failed")
    fields = vars(failed)["triptych_fields"]
    assert (fields["job_id"], fields["cause"]) == ("job-1", "MemoryError('words of a library')")


async def test_bad_media(bench: Bench) -> None:
    bench.engine.preprocess_error = BadMediaError("not an image")
    await bench.run(delivery_of())
    assert bench.reporter.said == [("job-1", FailureKind.BAD_MEDIA, "not an image")]
    assert bench.hand_over.num_reservations == 0


async def test_a_job_of_another_namespace_is_refused_and_costs_its_item_nothing(bench: Bench) -> None:
    """It is on this stream by mistake: whoever waits for the item finds it on none, and sends it again."""
    await claimed(bench, "req-0")
    strayed = delivery_of("job-0", "req-0", namespace_digest=ANOTHER)
    await bench.runner.run(strayed)  # type: ignore[arg-type]
    await bench.runner.give_up(strayed.envelope, "delivered too often")
    assert (strayed.rejected, strayed.num_acks) == (["job of another namespace than the stream's"], 0)
    assert bench.reporter.said == []
    assert bench.engine.orders == []
    assert bench.hand_over.num_reservations == 0
    flight = bench.inflight.flights[HASH]
    assert (flight.state, flight.attempt, flight.failure) == ("queued", 1, None)
    bench.jobs.remove(flight.entry_id)
    claim = await bench.inflight.claim_flight(
        HASH, [requester("req-0")], namespace_digest=ANOTHER, mode="check", job_id="job-0", attempt=1,
        max_attempts=2, ttl_s=10,
    )  # fmt: skip
    assert (claim.result, claim.job_id, claim.attempt) == (ClaimResult.OWNER, "job-0", 1)


async def test_media_that_are_gone(bench: Bench) -> None:
    await bench.run(delivery_of(blob=None))
    assert bench.reporter.kinds == [FailureKind.MEDIA_GONE]


@pytest.mark.parametrize("num_embeds", [98, 51])
async def test_an_item_longer_than_the_model_or_its_encoder_takes(bench: Bench, num_embeds: int) -> None:
    bench.engine.num_embeds = num_embeds
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.TOO_LARGE]


async def test_a_job_whose_deadline_has_passed_is_not_begun(bench: Bench) -> None:
    await bench.run(delivery_of(remaining_ms=0))
    assert bench.reporter.kinds == [FailureKind.EXPIRED]


async def test_an_item_that_the_engine_refuses_gives_its_reservation_back(bench: Bench) -> None:
    async def refuse(order: WriteOrder) -> None:
        raise EncodeRefusedError("too many tokens")

    bench.engine.on_encode = refuse
    delivery = delivery_of()
    await bench.run(delivery)
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert bench.hand_over.given_up == [(HASH, 1)]
    assert delivery.num_acks == 1


async def test_an_item_that_another_encoder_sealed_since_we_reserved_is_not_encoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = bench.hand_over.watch

    async def sealed_before(mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        bench.hand_over.is_sealed = True
        return await watch(mm_hash, timeout_s)

    monkeypatch.setattr(bench.hand_over, "watch", sealed_before)
    await bench.run(delivery_of())
    assert bench.engine.orders == []
    assert bench.hand_over.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.reporter.said[0].sealed
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]


async def test_a_refusal_of_what_another_encoder_sealed_meanwhile_does_not_matter(bench: Bench) -> None:
    async def refuse_late(order: WriteOrder) -> None:
        await bench.hand_over.seal(order)
        raise EncodeRefusedError("too late to be needed")

    bench.engine.on_encode = refuse_late
    await bench.run(delivery_of())
    assert bench.hand_over.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1], "the pin is nobody's"


async def test_an_output_that_is_not_written_fails_the_job_in_bounded_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SEAL_TIMEOUT_S", 0.01)

    async def write_nothing(order: WriteOrder) -> None:
        pass

    bench.engine.on_encode = write_nothing
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert bench.hand_over.given_up == [(HASH, 1)]
    assert len(bench.ledger) == 0


async def test_a_writer_that_is_lost_fails_the_job_at_once(bench: Bench) -> None:
    async def lose(order: WriteOrder) -> None:
        bench.hand_over.futures[0].set_exception(StoreError("unknown_reservation", "gone"))

    bench.engine.on_encode = lose
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]


async def test_a_watch_that_fails_gives_the_reservation_back(bench: Bench) -> None:
    bench.hand_over.watch_error = StoreError("unavailable", "gone")
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.ENCODER_ERROR]
    assert bench.hand_over.given_up == [(HASH, 1)]


async def test_a_dead_engine_leaves_the_job_to_another_encoder(bench: Bench) -> None:
    async def die(order: WriteOrder) -> None:
        raise EngineFailedError("dead")

    bench.engine.on_encode = die
    delivery = delivery_of()
    with pytest.raises(EngineFailedError):
        await bench.run(delivery)
    assert delivery.num_acks == 0


async def test_an_engine_that_lives_and_hangs_leaves_the_job_to_another_encoder(bench: Bench) -> None:
    """Its host would renew the job's lease for ever, and whoever asks for the item would join it."""

    async def hang(order: WriteOrder) -> None:
        await asyncio.Event().wait()

    bench.engine.on_encode = hang
    bench.runner._patience = EngineWatchdog(0.1)
    delivery = delivery_of()
    with pytest.raises(EngineFailedError, match="has not answered"):
        await bench.run(delivery)
    assert delivery.num_acks == 0
    assert bench.reporter.kinds == ["EncoderCacheMetadata"]  # no word that the item failed


async def test_an_engine_that_answers_others_is_only_slow() -> None:
    limit_s = 2.0
    patience, is_answered = EngineWatchdog(limit_s), asyncio.Event()

    async def slow() -> None:
        async with patience.with_job():
            await is_answered.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(slow())
        for _ in range(4):
            async with patience.with_job():
                await asyncio.sleep(0.3 * limit_s)
        is_answered.set()


async def test_an_outcome_that_cannot_be_told_leaves_the_job_to_another_encoder(bench: Bench) -> None:
    bench.reporter.error = BusUnavailableError("away")
    delivery = delivery_of()
    with pytest.raises(BusUnavailableError):
        await bench.run(delivery)
    assert delivery.num_acks == 0


async def test_a_cancelled_job_is_handed_back(bench: Bench) -> None:
    encodes = asyncio.Event()

    async def hang(order: WriteOrder) -> None:
        encodes.set()
        await asyncio.Event().wait()

    bench.engine.on_encode = hang
    delivery = delivery_of()
    bench.publish(delivery)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(bench.runner.run(delivery))  # type: ignore[arg-type]
        await encodes.wait()
        task.cancel()
    assert (delivery.num_acks, delivery.num_hand_backs) == (0, 1)


async def test_a_job_delivered_too_often_is_told_before_it_is_buried(bench: Bench) -> None:
    await bench.runner.give_up(delivery_of().envelope, "delivered 4 times")
    assert bench.reporter.said == [("job-1", FailureKind.DEAD_LETTER, "delivered 4 times")]


async def test_what_is_no_job_is_acked_and_ignored(bench: Bench) -> None:
    message = EncodeCompleted(job_id="j", mm_hash=HASH, encoder="e", encode_s=0)
    delivery = FakeDelivery(Envelope(message))
    await bench.run(delivery)
    assert delivery.num_acks == 1
    assert bench.reporter.said == []


# ---- several jobs --------------------------------------------------------------------------------
async def claimed(bench: Bench, *request_ids: str) -> None:
    """These wait for the item, in this order, and the first published the job."""
    requesters = [requester(request_id) for request_id in request_ids]
    for index, each in enumerate(requesters):
        await bench.inflight.claim_flight(
            HASH,
            [each],
            namespace_digest=DIGEST,
            mode="new",
            job_id=f"job-{index}",
            attempt=1,
            max_attempts=2,
            ttl_s=10,
        )
        if index == 0:
            job = delivery_of("job-0", request_ids[0]).envelope.message
            assert isinstance(job, EncodeJob)
            assert await bench.inflight.publish_job(job) == "1-1"


async def test_all_who_joined_hear_of_one_encode(bench: Bench) -> None:
    await claimed(bench, "req-0", "req-1", "req-2")
    await bench.run(delivery_of("job-0", "req-0"))
    assert len(bench.engine.orders) == 1
    (metadata,) = [each for each in bench.reporter.said if each.TYPE == "EncoderCacheMetadata"]
    assert [each.request_id for each in metadata.requesters] == ["req-0", "req-1", "req-2"]
    assert [bench.ledger.settled(HASH, (f"req-{n}", 0)) for n in range(3)] == [[], [], [1]]
    assert bench.inflight.flights[HASH].state == "finished"
    assert bench.runner._under_way == {}


async def test_who_joins_while_it_is_encoded_hears_too(bench: Bench) -> None:
    await claimed(bench, "req-0")

    async def on_encode(order: WriteOrder) -> None:
        await claimed(bench, "req-0", "req-1")
        await bench.hand_over.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of("job-0", "req-0"))
    metadata = [each for each in bench.reporter.said if each.TYPE == "EncoderCacheMetadata"]
    assert [[who.request_id for who in each.requesters] for each in metadata] == [["req-0"], ["req-1"]]
    assert [each.sealed for each in metadata] == [False, True]
    assert [bench.ledger.settled(HASH, (f"req-{n}", 0)) for n in range(2)] == [[], [1]]
    assert bench.inflight.flights[HASH].state == "finished"


async def test_no_pin_is_kept_for_who_left_meanwhile(bench: Bench) -> None:
    await claimed(bench, "req-0", "req-1")

    async def on_encode(order: WriteOrder) -> None:
        await bench.inflight.leave_flight(HASH, [("req-0", 0), ("req-1", 0)], namespace_digest=DIGEST)
        await bench.hand_over.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of("job-0", "req-0"))
    assert len(bench.engine.orders) == 1  # what runs is finished, into the cache
    assert bench.hand_over.unpinned == [1]
    assert len(bench.ledger) == 0
    assert bench.inflight.flights == {}


async def test_a_job_that_nobody_waits_for_is_dropped(bench: Bench) -> None:
    await claimed(bench, "req-0")
    bench.jobs.deliver("1-1")
    assert await bench.inflight.leave_flight(HASH, [("req-0", 0)], namespace_digest=DIGEST)
    delivery = delivery_of("job-0", "req-0")
    await asyncio.wait_for(bench.runner.run(delivery), 5)  # type: ignore[arg-type]
    assert (bench.engine.orders, bench.reporter.said, delivery.num_acks) == ([], [], 1)
    assert bench.runner._flights.num_dropped == 1


async def test_a_second_entry_of_a_job_that_is_worked_on_is_dropped(bench: Bench) -> None:
    """Sent again, because Redis had lost the first."""
    await claimed(bench, "req-0")

    async def on_encode(order: WriteOrder) -> None:
        again = delivery_of("job-0", "req-0")
        again.entry_id = "1-2"
        await bench.run(again)
        assert again.num_acks == 1
        await bench.hand_over.seal(order)

    bench.engine.on_encode = on_encode
    await bench.run(delivery_of("job-0", "req-0"))
    assert len(bench.engine.orders) == 1
    assert bench.runner._flights.num_superseded == 1


async def test_a_failure_is_heard_by_all_and_claimed_by_one(bench: Bench) -> None:
    await claimed(bench, "req-0", "req-1")

    async def refuse(order: WriteOrder) -> None:
        raise EncodeRefusedError("no")

    bench.engine.on_encode = refuse
    await bench.run(delivery_of("job-0", "req-0"))
    assert bench.reporter.kinds == ["EncoderCacheMetadata", FailureKind.ENCODER_ERROR]
    assert len(bench.ledger) == 0
    standings = []
    for n in range(2):
        claim = await bench.inflight.claim_flight(
            HASH,
            [requester(f"req-{n}")],
            namespace_digest=DIGEST,
            mode="retry",
            job_id=f"again-{n}",
            attempt=2,
            max_attempts=2,
            ttl_s=9,
        )
        standings.append(claim.result)
    assert standings == [ClaimResult.OWNER, ClaimResult.JOINED]


async def test_without_the_flights_a_job_is_done_for_those_it_names(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*args: Any, **options: Any) -> Any:
        raise BusUnavailableError("away")

    for step in ("start_job", "announce_metadata", "finish_flight"):
        monkeypatch.setattr(bench.inflight, step, away)
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]


async def test_a_full_redis_that_noted_nobody_is_no_reason_to_tell_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def started(*args: Any, **options: Any) -> Any:
        return StartResult.STARTED, ()

    monkeypatch.setattr(bench.inflight, "start_job", started)
    await bench.run(delivery_of())
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]


async def test_a_second_delivery_of_a_job_does_not_undo_that_the_first_has_begun(bench: Bench) -> None:
    first, second = delivery_of(), delivery_of()
    second.entry_id = "1-2"
    write, seen = bench.engine.on_encode, list[bool]()

    async def on_encode(order: WriteOrder) -> None:
        await bench.run(second)
        seen.extend(bench.runner.has_begun(each) for each in (first, second))  # type: ignore[arg-type]
        await write(order)

    bench.engine.on_encode = on_encode
    await bench.run(first)
    assert seen == [True, False]
    assert not bench.runner.has_begun(first)  # type: ignore[arg-type]


async def test_a_failed_job_does_not_take_the_item_from_those_of_an_earlier_one(bench: Bench) -> None:
    await bench.run(delivery_of("job-1", "req-1"))
    await bench.run(delivery_of("job-2", "req-2", remaining_ms=0))
    assert bench.hand_over.unpinned == []
    assert bench.ledger.settled(HASH, ("req-1", 0)) == [1]


def test_a_job_can_be_imported_without_vllm_and_torch() -> None:
    code = "import sys, triptych_encoder.jobs.job; print(sorted({'vllm', 'torch'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
