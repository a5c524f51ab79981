"""The gateway's metrics, scraped from its endpoint: latencies, encodes, caches, streams; bounded labels."""

import asyncio
import math

import pytest

from tests.integration.gateway.chat.test_chat import image, text
from tests.support.gateway.samples import DIGEST, MODEL, image_bytes
from tests.support.gateway.system import System, another_gateway
from tests.support.scraping import Scrape, scrape
from tests.support.waiting import until
from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import read_lags
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import ECTransferParams, EncodeClass, FailureKind, Modality, Role
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.decision.decision_policy import DecisionReason, EncodeWay
from triptych_gateway.encode import scrape_gauges
from triptych_gateway.locality.encode_stores import PlaceReason
from triptych_gateway.routing.routes import RouteMode, RouteReason
from triptych_gateway.routing.scheduling.candidates import CHANCE, EQUAL, ONLY, ServingStage
from triptych_gateway.routing.scheduling.profiles import SCORERS
from triptych_gateway.routing.variants import VariantReason

ROUTE = "/v1/chat/completions"
ALLOWED = {
    "route": [ROUTE],
    "model": [MODEL],
    "modality": ["text", "mixed", *(each.value for each in Modality)],
    "namespace": [DIGEST],
    "store": [DEFAULT_STORE],
    "status": ["200", "400", "404"],
    "how": ["ordered", "joined", "sizes_known"],
    "level": ["memory", "redis", "store"],
    "class": [each.value for each in EncodeClass],
    "kind": [each.value for each in FailureKind],
    "way": [each.value for each in (*EncodeWay, *RouteMode)],
    "reason": [
        *(each.value for each in (*DecisionReason, *PlaceReason, *RouteReason, *VariantReason)),
        *SCORERS,
        ONLY,
        EQUAL,
        CHANCE,
    ],
    "version": [""],
    "role": [each.value for each in Role],
    "stage": [each.value for each in ServingStage],
}


@pytest.fixture(autouse=True)
def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_gauges, "READ_INTERVAL_S", 0.0)


async def scraped(system: System) -> Scrape:
    return await asyncio.to_thread(scrape, system.gateway.settings.port)


def series(**labels: str) -> dict[str, str]:
    return {"route": ROUTE, "model": MODEL} | labels


async def test_latencies_by_route_model_and_modality(system: System) -> None:
    async for _ in await system.ask("hello", stream=True):
        pass
    await system.ask([text("what"), image()])
    now = await scraped(system)
    of_text, of_image = series(modality="text"), series(modality="image")
    name = "triptych_gateway_"
    assert now.total(f"{name}time_to_first_token_seconds_count", **of_text) == 1
    assert now.total(f"{name}inter_token_latency_seconds_count", **of_text) == 3  # 3 words and the end
    assert now.total(f"{name}request_time_per_output_token_seconds_count", **of_text) == 1
    assert now.total(f"{name}e2e_request_latency_seconds_count", **of_text) == 1
    assert now.total(f"{name}time_to_first_token_seconds_count", **of_image) == 0  # not streamed
    assert now.total(f"{name}e2e_request_latency_seconds_count", **of_image) == 1
    assert now.total(f"{name}items_per_request_sum", modality="image") == 1


async def test_what_media_weigh_and_what_their_check_takes_by_modality(system: System) -> None:
    num_bytes = len(image_bytes(7)) + len(image_bytes(9))
    await system.ask([text("what"), image(7), image(9)])
    now = await scraped(system)
    images = {"modality": "image"}
    assert now.total("triptych_gateway_item_bytes_count", **images) == 2
    assert now.total("triptych_gateway_item_bytes_sum", **images) == num_bytes
    assert now.total("triptych_gateway_item_check_seconds_count", **images) == 2
    assert now.total("triptych_gateway_fetch_seconds_count") == 0  # none was named by URL


async def test_encodes_caches_and_failures(system: System) -> None:
    picture, orders = [text("what"), image()], system.gateway.orders

    async def is_sealed(params: ECTransferParams) -> None:
        """What becomes of an encode is counted as long as a request waits for it."""
        await until(lambda: not any(item.in_flight for item in orders.table))

    system.prefill_decode.waits_for = is_sealed
    await system.ask(picture)
    now = await scraped(system)
    assert now.total("triptych_gateway_encode_seconds_count") == 1
    assert now.total("triptych_gateway_items_total", how="ordered") == 1
    assert now.total("triptych_gateway_cache_hits_total") == 0
    await system.ask(picture)
    assert (await scraped(system)).total("triptych_gateway_cache_hits_total", level="memory") == 1
    async with another_gateway(system, "gateway-1") as other:
        await other.ask(picture)
        now = await scraped(other)
        assert now.total("triptych_gateway_cache_hits_total", level="redis") == 1
        assert now.total("triptych_gateway_cache_hits_total", level="memory") == 0
    system.encoder.failures.append(FailureKind.ENCODER_ERROR)
    await system.ask([text("what"), image(7)])
    now = await scraped(system)
    assert now.total("triptych_gateway_encode_failures_total", kind="encoder_error") == 1
    assert now.total("triptych_gateway_encode_retries_total") == 1


async def test_what_waits_on_the_streams(system: System) -> None:
    await system.refresh()
    system.encoder.before_metadata.clear()
    asked = asyncio.get_running_loop().create_task(system.ask([text("what"), image()]))
    await until(lambda: system.encoder.jobs)
    now = await scraped(system)
    assert now.total("triptych_gateway_redis_up") == 1
    assert now.total("triptych_gateway_encode_jobs_pending", namespace=DIGEST) == 1
    assert now.total("triptych_gateway_encode_jobs_waiting", namespace=DIGEST) == 0
    assert 0 <= now.total("triptych_gateway_oldest_encode_job_seconds", namespace=DIGEST) < 60
    assert now.total("triptych_gateway_encodes_in_flight") == 1
    assert now.total("triptych_gateway_dead_letters") == 0
    system.encoder.before_metadata.set()
    await asked
    await until(lambda: not any(item.in_flight for item in system.gateway.orders.table))
    now = await scraped(system)
    assert now.total("triptych_gateway_encodes_in_flight") == 0


async def test_work_that_waits_for_encoders_counts_once_over_gateways(system: System) -> None:
    await system.refresh()
    name = "triptych_gateway_encode_seconds_waiting"
    idle = await scraped(system)
    assert name in idle.names, "0 is a value"
    assert idle.total(name, namespace=DIGEST) == 0
    system.encoder.before_metadata.clear()
    picture = [text("what"), image()]
    loop = asyncio.get_running_loop()
    async with another_gateway(system, "gateway-1") as other:
        asked = [loop.create_task(system.ask(picture))]
        await until(lambda: system.encoder.jobs)
        alone = (await scraped(system)).total(name, namespace=DIGEST)
        asked.append(loop.create_task(other.ask(picture)))
        await until(lambda: any(item.is_claimed for item in other.gateway.orders.table))
        assert alone > 0
        assert (await scraped(system)).total(name) == pytest.approx(alone)
        assert (await scraped(other)).total(name) == 0, "it has joined the first one's job"
        system.encoder.before_metadata.set()
        await asyncio.gather(*asked)
    await until(lambda: not any(item.in_flight for item in system.gateway.orders.table))
    assert (await scraped(system)).total(name) == 0


async def test_without_redis_a_scrape_answers_and_says_so(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    await system.refresh()
    assert "triptych_gateway_encode_jobs_pending" in (await scraped(system)).names

    async def refuse(bus: AsyncBus, streams: object) -> None:
        raise BusUnavailableError("away")

    monkeypatch.setattr(scrape_gauges, "read_lags", refuse)
    now = await scraped(system)
    assert now.total("triptych_gateway_redis_up") == 0
    assert now.total("triptych_gateway_oldest_encode_job_seconds", namespace=DIGEST) == 0
    assert math.isnan(now.total("triptych_gateway_dead_letters"))


async def test_redis_is_read_once_however_many_scrape(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[object] = []

    async def counted(bus: AsyncBus, streams: list[str]) -> object:
        reads.append(streams)
        return await read_lags(bus, streams)

    monkeypatch.setattr(scrape_gauges, "read_lags", counted)
    monkeypatch.setattr(scrape_gauges, "READ_INTERVAL_S", 60.0)
    await asyncio.gather(*(scraped(system) for _ in range(5)))
    assert len(reads) == 1


async def test_no_label_has_a_callers_text(system: System) -> None:
    hostile = 'x"}\n{evil="1'
    await system.ask("hello")
    for body in (
        {"model": hostile, "messages": [{"role": "user", "content": hostile}]},
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": hostile}]}]},
        {"model": MODEL, "stream": hostile, "messages": [{"role": hostile, "content": "x"}]},
    ):
        assert (await system.post(body)).status_code in (400, 404)
    await system.post({"model": MODEL, "messages": [{"role": "user", "content": [text("x"), image()]}]})
    await system.http.get(f"/{hostile.encode().hex()}")
    assert (await scraped(system)).unbounded(ALLOWED) == []
