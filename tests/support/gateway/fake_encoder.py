"""FAKE: an encoder that follows the protocol and computes nothing. Real ones are tested in tests/engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.support.gateway.samples import DIGEST, MODEL
from tests.support.item_records import IMAGE_LIMITS, grid_of_media, item_record
from tests.support.message_samples import cache_metadata, instance_record
from triptych_common.bus import AsyncBus, Delivery
from triptych_common.coordination import Registry, SingleFlight, StartResult
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    InstanceRecord,
    Message,
    Modality,
    Requester,
    Role,
    requester_key,
)
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP

TAKEOVER_IDLE_MS = 500
PREFETCH = 8

MAX_RECORD_TOKENS = 4096  # nobody renders them here


@dataclass
class FakeEncoder:
    """Takes jobs; the sizes are the picture's size, or the number of another item's bytes.

    'The tensor' is the mm_hash in `sealed`.
    """

    bus: AsyncBus
    name: str = "encoder-0"
    digest: str = DIGEST
    store: str = DEFAULT_STORE
    jobs: list[EncodeJob] = field(default_factory=list)
    traceparents: list[str | None] = field(default_factory=list)
    media: list[bytes] = field(default_factory=list)
    sealed: set[str] = field(default_factory=set)
    failures: list[FailureKind] = field(default_factory=list)  # of the next jobs, before their metadata
    fail_after_metadata: FailureKind | None = None
    dropped: list[StartResult] = field(default_factory=list)  # jobs that were not to be done
    before_start: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: jobs wait here
    before_metadata: asyncio.Event = field(default_factory=asyncio.Event)
    before_seal: asyncio.Event = field(default_factory=asyncio.Event)
    num_encodes: int = 0
    mute_jobs: int = 0  # so many jobs are done without any message, and Redis loses the flight
    loses_results: bool = False  # what it sends to gateways is lost
    vanishing_jobs: int = 0  # so many are taken off the stream, and that is all
    vanished: list[EncodeJob] = field(default_factory=list)
    pieces: int = 1  # of each item
    item_limits: Mapping[Modality, int] = field(default_factory=lambda: IMAGE_LIMITS)
    unserved_modalities: Mapping[Modality, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.before_start.set()
        self.before_metadata.set()
        self.before_seal.set()

    def record(self) -> InstanceRecord:
        return instance_record(
            self.name,
            Role.ENCODE,
            boot_id="boot",
            model=MODEL,
            namespace_digest=self.digest,
            item_limits=dict(self.item_limits),
            unserved_modalities=dict(self.unserved_modalities),
            store=self.store,
            num_slots=16,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["FakeEncoder"]:
        async with Registry(self.bus).keep_registered(self.record()), asyncio.TaskGroup() as group:
            task = group.create_task(self._consume(group))
            try:
                yield self
            finally:
                task.cancel()
                self.before_start.set()
                self.before_metadata.set()
                self.before_seal.set()

    async def _consume(self, group: asyncio.TaskGroup) -> None:
        stream = self.bus.names.encode_jobs(self.digest, self.store)
        async with self.bus.consumer(
            stream, group=ENCODERS_GROUP, consumer=self.name, prefetch=PREFETCH, min_idle_ms=TAKEOVER_IDLE_MS
        ) as consumer:
            async for delivery in consumer:
                group.create_task(self._handle(delivery))

    async def _handle(self, delivery: Delivery) -> None:
        job, flights = delivery.envelope.message, SingleFlight(self.bus)
        assert isinstance(job, EncodeJob)
        await self.before_start.wait()
        if self.vanishing_jobs:
            self.vanishing_jobs -= 1
            self.vanished.append(job)
            await delivery.ack()
            return
        start, _ = await flights.start_job(
            job,
            delivery.entry_id,
            self.name,
            lease_s=TAKEOVER_IDLE_MS / 1000,
            ttl_s=10,
            stream=delivery.stream,
        )
        if start is StartResult.STARTED:
            self.jobs.append(job)
            self.traceparents.append(delivery.envelope.traceparent)
            await self._work(flights, job, delivery.envelope.blob)
        else:
            self.dropped.append(start)
        await delivery.ack()

    async def _work(self, flights: SingleFlight, job: EncodeJob, blob: bytes | None) -> None:
        await self.before_metadata.wait()
        if self.mute_jobs:
            self.mute_jobs -= 1
            self.num_encodes += 1
            self.sealed.add(job.mm_hash)
            await self.bus.client.delete(self.bus.names.inflight(self.digest, job.mm_hash))
            return
        if self.failures:
            await self._fail(flights, job, self.failures.pop(0))
            return
        try:
            media = blob if blob is not None else await self._fetch(job)
        except httpx.HTTPStatusError:
            await self._fail(flights, job, FailureKind.MEDIA_GONE)
            return
        self.media.append(media)
        try:
            _, height, width = grid_of_media(media, job.modality)
        except Exception:  # Pillow fails at hostile bytes in many ways
            await self._fail(flights, job, FailureKind.BAD_MEDIA)
            return
        is_known = job.mm_hash in self.sealed
        metadata = self.metadata(job, width, height).model_copy(update={"sealed": is_known})
        informed = await self._announce(flights, metadata, ())
        if not is_known:
            await self.before_seal.wait()
            if self.fail_after_metadata is not None:
                await self._fail(flights, job, self.fail_after_metadata)
                return
            self.num_encodes += 1
            self.sealed.add(job.mm_hash)
            self.sealed.update(entry_hashes(MmHash(job.mm_hash), metadata.record.pieces))
        metadata = metadata.model_copy(update={"sealed": True})
        completed = EncodeCompleted(job_id=job.job_id, mm_hash=job.mm_hash, encoder=self.name, encode_s=0.001)
        is_ended, reported = False, list[Requester]()
        while not is_ended:  # like an encoder: until none has joined meanwhile
            informed = await self._announce(flights, metadata, informed)
            await self._send(tuple(each for each in informed if each not in reported), completed)
            reported = list(informed)
            keys = [requester_key(each) for each in informed]
            is_ended, _ = await flights.finish_flight(metadata, keys, namespace_digest=self.digest)

    def metadata(self, job: EncodeJob, width: int, height: int) -> EncoderCacheMetadata:
        """Of a picture of that size, without requesters."""
        num_rows, num_pieces = width * height, self.pieces
        pieces = () if num_pieces == 1 else (num_rows // num_pieces,) * num_pieces
        record = item_record(min(num_rows, MAX_RECORD_TOKENS), (1, height, width))
        return cache_metadata(
            job_id=job.job_id,
            mm_hash=job.mm_hash,
            modality=job.modality,
            num_embeds=width * height,
            num_bytes=width * height * 16,
            record=record.model_copy(update={"pieces": pieces}),
            encoder=self.name,
            store=self.store,
        )

    async def _announce(
        self, flights: SingleFlight, metadata: EncoderCacheMetadata, informed: tuple[Requester, ...]
    ) -> tuple[Requester, ...]:
        """To the requesters that wait and have not had it. Returns all that have."""
        waiting = await flights.announce_metadata(metadata, namespace_digest=self.digest)
        new = tuple(each for each in waiting or () if each not in informed)
        if new:
            message = metadata.model_copy(update={"requesters": new})
            await self._send(new, message)
            for instance in {requester.prefill_decode for requester in new}:
                await self.bus.publish(self.bus.names.metadata(instance), message)
        return informed + new

    async def _fail(self, flights: SingleFlight, job: EncodeJob, kind: FailureKind) -> None:
        failure = EncodeFailed(
            job_id=job.job_id, mm_hash=job.mm_hash, encoder=self.name, kind=kind, detail="a fake failure"
        )
        waiting = await flights.fail_flight(failure, namespace_digest=self.digest)
        await self._send(job.requesters if waiting is None else waiting, failure)

    async def _fetch(self, job: EncodeJob) -> bytes:
        assert job.media_url is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(job.media_url)
            answer.raise_for_status()
            return answer.content

    async def _send(self, requesters: tuple[Requester, ...], message: Message) -> None:
        for gateway in {requester.gateway for requester in requesters if not self.loses_results}:
            await self.bus.publish(self.bus.names.encode_results(gateway), message)
