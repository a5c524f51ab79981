"""Jobs go to encoders near the language model, to others when those are busy, and on when a host is gone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import DIGEST, image_part
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.scraping import scrape
from tests.support.waiting import until, until_async
from triptych_common.protocol.messages import EncodeJob, InstanceRecord
from triptych_common.protocol.names import DEFAULT_STORE

FAR = "store-far"
SLOW_LINK = {"link_bytes_per_s": 1.0}  # no transfer is worth it


class SpeakingEncoder(FakeEncoder):
    """It says how fast it is: a second for each row of an item."""

    def record(self) -> InstanceRecord:
        return super().record().model_copy(update={"row_s": 1.0})


@asynccontextmanager
async def two_hosts(
    redis_url: str, run_dir: Path, **settings: Any
) -> AsyncIterator[tuple[System, SpeakingEncoder]]:
    """The language model and an encoder at one store, another encoder at another."""
    fake = FakePrefillDecode(store=DEFAULT_STORE)
    async with opened_system(redis_url, run_dir, fake, **settings) as system:
        far = SpeakingEncoder(system.bus, name="encoder-far", store=FAR)
        async with far.running():
            await until(lambda: len(system.gateway.view.encoding) == 2)
            yield system, far


def images(*numbers: int) -> list[dict[str, Any]]:
    return [image_part(each) for each in numbers]


async def places(system: System) -> dict[str, float]:
    """Jobs published, by reason."""
    found = await asyncio.to_thread(scrape, system.gateway.settings.port)
    name = "triptych_gateway_encode_places_total"
    reasons = ("near", "less_busy", "only_place", "near_failed", "anywhere", "no_encoder")
    return {each: num for each in reasons if (num := found.total(name, reason=each))}


async def waiting(system: System, store: str) -> int:
    return await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST, store))


async def test_one_host_is_the_only_place(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path) as system:
        await until(lambda: system.gateway.view.encoding)
        await system.ask(images(1))
        assert await places(system) == {"only_place": 1}


async def test_near_encoders_get_the_jobs_while_they_keep_up(redis_url: str, tmp_path: Path) -> None:
    async with two_hosts(redis_url, tmp_path) as (system, far):
        for number in range(3):
            await system.ask(images(number))
        assert (len(system.encoder.jobs), len(far.jobs)) == (3, 0)
        assert await places(system) == {"near": 3}


async def test_busy_near_encoders_are_passed_over(redis_url: str, tmp_path: Path) -> None:
    async with two_hosts(redis_url, tmp_path) as (system, far):
        system.encoder.before_start.clear()
        first = asyncio.ensure_future(system.ask(images(1)))
        await until_async(lambda: _is_published(system, DEFAULT_STORE, 1))
        await system.ask(images(2))
        assert len(far.jobs) == 1
        assert await places(system) == {"near": 1, "less_busy": 1}
        system.encoder.before_start.set()
        await first


async def _is_published(system: System, store: str, count: int) -> bool:
    return await waiting(system, store) >= count


async def test_a_slow_link_keeps_jobs_near(redis_url: str, tmp_path: Path) -> None:
    async with two_hosts(redis_url, tmp_path, **SLOW_LINK) as (system, far):
        system.encoder.before_start.clear()
        asked = [asyncio.ensure_future(system.ask(images(number))) for number in range(3)]
        await until_async(lambda: _is_published(system, DEFAULT_STORE, 3))
        assert await places(system) == {"near": 3}
        system.encoder.before_start.set()
        await asyncio.gather(*asked)
        assert not far.jobs


async def test_jobs_of_a_host_that_is_gone_are_done_at_another(redis_url: str, tmp_path: Path) -> None:
    """It took one of them, and others waited for it; each is encoded once, elsewhere."""
    async with opened_system(
        redis_url, tmp_path, FakePrefillDecode(store=FAR), flight_check_s=0.1, first_token_timeout_s=60.0
    ) as system:
        doomed = SpeakingEncoder(system.bus, name="encoder-far", store=FAR)
        doomed.before_start.clear()
        async with doomed.running():
            await until(lambda: len(system.gateway.view.encoding) == 2)
            with_slow_link = system.gateway.orders._stores
            with_slow_link._measured_s = lambda source, target, num_bytes: 1e9
            asked = asyncio.ensure_future(system.ask(images(1, 2, 3)))
            await until_async(lambda: _is_published(system, FAR, 3))
            assert not system.encoder.jobs
            doomed.vanishing_jobs = 100  # what it took it does not begin
        await asked
        assert len(system.encoder.jobs) == 3
        assert len({each.mm_hash for each in system.encoder.jobs}) == 3
        await system.assert_idle()


async def test_an_order_for_one_store_alone(redis_url: str, tmp_path: Path) -> None:
    """As after a transfer that failed: the item's next job is for encoders near the language model."""
    async with two_hosts(redis_url, tmp_path) as (system, far):
        ordered: list[str | None] = []
        order = system.gateway.orders.table.order_item

        def order_far(*about: Any, **options: Any) -> bool:
            ordered.append(options["only_near"])
            return order(*about, **options | {"only_near": FAR})

        system.gateway.orders.table.order_item = order_far  # type: ignore[method-assign]
        await system.ask(images(1))
        assert ordered == [None]
        assert await places(system) == {"near_failed": 1}
        assert (len(system.encoder.jobs), len(far.jobs)) == (0, 1)


async def test_order_near_names_the_store(redis_url: str, tmp_path: Path) -> None:
    async with two_hosts(redis_url, tmp_path) as (system, far):
        system.prefill_decode.waits_for = _until_released(system)
        asked = asyncio.ensure_future(system.ask(images(1)))
        await until(lambda: system.encoder.sealed)
        (mm_hash,) = system.encoder.sealed
        item = system.gateway.orders.table.get(mm_hash)
        assert item is not None
        await until(lambda: not item.in_flight)
        system.gateway.orders.order_near(item.mm_hash, FAR)
        await until(lambda: far.jobs)
        assert item.only_near == FAR
        system.prefill_decode.release.set()
        await asked


def _until_released(system: System) -> Any:
    async def wait(about: object) -> None:
        await system.prefill_decode.release.wait()

    return wait


async def test_gateways_share_one_flight_over_the_streams(redis_url: str, tmp_path: Path) -> None:
    """One knows of another language model than the other: the first one's place holds for both."""
    async with two_hosts(redis_url, tmp_path) as (system, far):
        system.encoder.before_start.clear()
        async with another_gateway(system, "gateway-1") as other:
            await until(lambda: len(other.gateway.view.encoding) == 2)
            first = asyncio.ensure_future(system.ask(images(1)))
            await until_async(lambda: _is_published(system, DEFAULT_STORE, 1))
            second = asyncio.ensure_future(other.ask(images(1)))
            await until(lambda: len(other.gateway.orders.flight_requests))
            system.encoder.before_start.set()
            await asyncio.gather(first, second)
        jobs: list[EncodeJob] = [*system.encoder.jobs, *far.jobs]
        assert len({each.job_id for each in jobs}) == 1
