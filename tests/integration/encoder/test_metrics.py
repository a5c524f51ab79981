"""The encoder's metrics, scraped from its host: real Redis, real store, and a real listener."""

import asyncio
import contextlib

import pytest

from tests.support.encoder.service_bench import LIMIT_S, TimidEngine, job, serve, settings_of, working
from tests.support.scraping import Scrape, scrape
from tests.support.stores import StoreProcess
from tests.support.waiting import free_port, until, until_async
from triptych_common.protocol.messages import FailureKind, Modality
from triptych_common.runtime import ListenError, StopSignal
from triptych_common.runtime.scrape_server import check_listener
from triptych_encoder.encoding import BadMediaError, PreparedItem
from triptych_encoder.jobs.active_job import JobState

GOOD, BAD, HELD, AGAIN = "a" * 64, "b" * 64, "c" * 64, "d" * 64

ALLOWED = {
    "modality": [each.value for each in Modality],
    "outcome": [*(each.value.replace(" ", "_") for each in JobState), "refused"],
    "kind": [each.value for each in FailureKind],
}


async def scraped(port: int) -> Scrape:
    return await asyncio.to_thread(scrape, port)


async def scraped_once(port: int, name: str, value: float) -> Scrape:
    """The first scrape whose samples of this name make `value`."""
    found: list[Scrape] = []

    async def is_there() -> bool:
        with contextlib.suppress(ConnectionRefusedError):  # it starts
            found.append(await scraped(port))
        return bool(found) and found[-1].total(name) >= value

    await until_async(is_there, LIMIT_S)
    return found[-1]


async def test_what_a_job_goes_through_is_counted_and_timed(
    redis_url: str, store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    preprocess = TimidEngine.preprocess

    async def refuse_bad(self: TimidEngine, job: object, media: bytes) -> PreparedItem:
        prepared = await preprocess(self, job, media)
        if getattr(job, "mm_hash", "") == BAD:
            raise BadMediaError("no image")
        return prepared

    monkeypatch.setattr(TimidEngine, "preprocess", refuse_bad)
    async with (
        working(redis_url, store, drain_timeout_s=60, metrics_port=port) as bench,
        asyncio.timeout(LIMIT_S),
    ):
        engine = bench.engine
        for mm_hash in (GOOD, BAD):
            await bench.publish(mm_hash)
            engine.may_preprocess[mm_hash].set()
        await engine.is_encoding.wait()
        (failed,) = [each for each in await bench.results(2) if each.TYPE == "EncodeFailed"]
        assert failed.kind is FailureKind.BAD_MEDIA  # type: ignore[attr-defined]
        now = await scraped(port)
        assert now.total("triptych_encoder_slots") == 2
        assert now.total("triptych_encoder_slots_in_use") == 1
        assert now.total("triptych_encoder_seals_total") == 0

        engine.may_encode.set()
        assert [each.TYPE for each in await bench.results(1)] == ["EncodeCompleted"]
        await bench.bus.client.delete(bench.bus.names.inflight("d" * 64, GOOD))  # Redis has lost its flight
        await bench.publish(GOOD, "req-2")  # it is in the store by now
        await bench.results(2)
        now = await scraped_once(port, "triptych_encoder_jobs_total", 3)

    images = {"modality": "image"}
    assert now.total("triptych_encoder_jobs_total", outcome="completed", **images) == 2
    assert now.total("triptych_encoder_jobs_total", outcome="failed", **images) == 1
    assert now.total("triptych_encoder_job_failures_total", kind="bad_media", **images) == 1
    assert now.total("triptych_encoder_seals_total") == 1
    assert now.total("triptych_encoder_store_hits_total", **images) == 1
    assert now.total("triptych_encoder_media_bytes_total", **images) == 3 * len(b"media")
    assert now.total("triptych_encoder_item_bytes_count", **images) == 3
    assert now.total("triptych_encoder_item_bytes_sum", **images) == 3 * len(b"media")
    assert now.total("triptych_encoder_decode_seconds_count", **images) == 2  # one was refused
    assert now.total("triptych_encoder_takeovers_total") == 0
    for stage, times in {"queue": 3, "preprocess": 3, "reserve": 2, "gate": 1, "encode": 1}.items():
        assert now.total(f"triptych_encoder_{stage}_seconds_count", **images) == times, stage
    assert now.total("triptych_encoder_fetch_seconds_count") == 0  # they came with their jobs
    assert now.total("triptych_encoder_batch_items_count") == 1
    assert now.total("triptych_encoder_batch_items_sum") == 1
    assert now.unbounded(ALLOWED) == []


async def test_a_job_that_another_consumer_had_is_a_takeover(redis_url: str, store: StoreProcess) -> None:
    port = free_port()
    async with working(redis_url, store, metrics_port=port, takeover_idle_ms=50) as bench:
        engine = bench.engine
        async with asyncio.timeout(LIMIT_S):
            await until_async(bench.records)
            jobs = bench.bus.names.encode_jobs("d" * 64)
            await bench.bus.client.xgroup_createconsumer(jobs, "encoders", "dead-encoder")
            for mm_hash in (HELD, AGAIN):  # both slots
                await bench.publish(mm_hash)
            await until(lambda: engine.num_preprocessing >= 2)
            await bench.publish(GOOD)
            await bench.bus.client.xreadgroup("encoders", "dead-encoder", {jobs: ">"}, count=1)
            for mm_hash in (HELD, AGAIN, GOOD):
                engine.may_preprocess[mm_hash].set()
            engine.may_encode.set()
            now = await scraped_once(port, "triptych_encoder_takeovers_total", 1)
    assert now.total("triptych_encoder_queue_seconds_sum") >= 0.05  # it waited until it was taken over


async def test_nothing_listens_unless_it_is_set(
    redis_url: str, store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[object] = []
    for name in ("start_server", "start_unix_server"):
        monkeypatch.setattr(asyncio, name, lambda *args, **kwargs: servers.append(args))
    async with working(redis_url, store) as bench, asyncio.timeout(LIMIT_S):
        await until_async(bench.records)
        bench.stop.set("SIGTERM")
        await bench.work
    assert servers == []


async def test_a_port_that_is_taken_ends_the_service_with_a_clear_error(
    redis_url: str, store: StoreProcess
) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        settings = settings_of(redis_url, store, metrics_port=port)
        why = f"cannot serve metrics: cannot listen on 127.0.0.1 port {port}"
        with pytest.raises(ListenError, match=why):
            check_listener(settings)  # before the engine is started
        with pytest.raises(ListenError, match=why):
            await serve(settings, None, StopSignal())


async def test_a_strayed_job_is_refused_and_counted(redis_url: str, store: StoreProcess) -> None:
    port = free_port()
    async with working(redis_url, store, metrics_port=port) as bench, asyncio.timeout(LIMIT_S):
        strayed = job(GOOD).model_copy(update={"namespace_digest": "e" * 64})
        await bench.bus.publish(bench.bus.names.encode_jobs("d" * 64), strayed, remaining_ms=60_000)
        now = await scraped_once(port, "triptych_encoder_jobs_total", 1)
    assert now.total("triptych_encoder_jobs_total", outcome="refused", modality="image") == 1
