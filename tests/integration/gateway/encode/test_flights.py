"""One encode per item over all gateways; jobs without requests, and jobs that Redis lost. By counting."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.fake_encoder import PREFETCH
from tests.support.gateway.samples import DIGEST, MODEL, image_part
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until, until_async
from triptych_common.coordination import SingleFlight, StartResult, single_flight
from triptych_common.coordination.single_flight import merge_backlogs
from triptych_common.protocol.messages import EncodeCompleted, FailureKind, Requester

CHECK_S = 0.1


IMAGE = image_part(3)


@pytest.fixture
async def pair(redis_url: str, tmp_path: Path) -> AsyncIterator[tuple[System, System]]:
    """Two gateways in front of one encoder and one prefill_decode."""
    async with (
        opened_system(redis_url, tmp_path, flight_check_s=CHECK_S) as system,
        another_gateway(system, "gateway-1") as other,
    ):
        yield system, other


async def num_flights(system: System) -> int:
    return len(await system.bus.client.keys(system.bus.names.inflight("*", "*")))


async def num_queued(system: System) -> int:
    return await system.bus.stream_length(system.bus.names.encode_jobs(DIGEST))


async def assert_nothing_is_left(*systems: System) -> None:
    for system in systems:
        await system.assert_idle()
        assert len(system.gateway.orders.table) == 0
        await until(lambda gateway=system.gateway: not len(gateway.orders.flight_requests))
    assert await eventually(num_flights, systems[0], 0)
    assert await eventually(num_queued, systems[0], 0)


async def forget_sizes(system: System) -> None:
    await system.bus.client.delete(system.bus.names.sizes, system.bus.names.sizes_order)


async def eventually(count: Callable[[System], Awaitable[int]], system: System, expected: int) -> bool:
    """For what only Redis knows."""

    async def is_so() -> bool:
        return await count(system) == expected

    await until_async(is_so)
    return True


class Departing:
    """A client that can go away."""

    def __init__(self, system: System, group: asyncio.TaskGroup, content: Any = (IMAGE,)) -> None:
        self._system = system
        self._body = {"model": MODEL, "messages": [{"role": "user", "content": list(content)}]}
        self._task = group.create_task(self._ask())

    async def _ask(self) -> None:
        await self._system.http.post("/v1/chat/completions", json=self._body)

    def go_away(self) -> None:
        self._task.cancel()


# ---- single flight ---------------------------------------------------------------------------------
async def test_concurrent_requests_through_two_gateways_are_one_encode(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(each.ask([IMAGE])) for _ in range(3) for each in pair]
        await until(lambda: system.encoder.jobs)
        await until(lambda: all(len(each.gateway.orders.flight_requests) for each in pair))
        system.encoder.before_metadata.set()
    assert all(answer.result().choices for answer in answers)
    await until(lambda: system.encoder.num_encodes)
    assert (len(system.encoder.jobs), system.encoder.num_encodes) == (1, 1)
    await assert_nothing_is_left(system, other)


async def test_a_request_that_joins_a_running_job_has_the_sizes_at_once(
    pair: tuple[System, System],
) -> None:
    system, other = pair
    system.encoder.before_seal.clear()

    async def sealed(params: Any) -> None:
        await system.encoder.before_seal.wait()

    system.prefill_decode.waits_for = sealed
    async with asyncio.TaskGroup() as group:
        first = group.create_task(system.ask([IMAGE]))
        await until(lambda: len(system.prefill_decode.bodies) == 1)
        await forget_sizes(system)  # only the flight knows
        second = group.create_task(other.ask([IMAGE]))
        await until(lambda: len(system.prefill_decode.bodies) == 2)
        assert system.encoder.num_encodes == 0
        system.encoder.before_seal.set()
    assert first.result().choices
    assert second.result().choices
    await until(lambda: system.encoder.num_encodes)
    assert (len(system.encoder.jobs), system.encoder.num_encodes) == (1, 1)
    await assert_nothing_is_left(system, other)


@pytest.mark.parametrize(
    ("failures", "status", "num_jobs"),
    [
        ([FailureKind.ENCODER_ERROR], 200, 2),
        ([FailureKind.ENCODER_ERROR] * 9, 503, 2),
        # Media that went with their gateway use up no attempts.
        ([FailureKind.MEDIA_GONE] * (single_flight.MAX_SENDS - 1), 200, single_flight.MAX_SENDS),
    ],
    ids=["one error", "many errors", "media gone"],
)
async def test_attempts_are_counted_over_both_gateways(
    pair: tuple[System, System], failures: list[FailureKind], status: int, num_jobs: int
) -> None:
    system, other = pair
    system.encoder.failures = list(failures)
    system.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(each.post(body())) for each in pair]
        await until(lambda: all(len(each.gateway.orders.flight_requests) for each in pair))
        await until(lambda: system.encoder.jobs)
        system.encoder.before_metadata.set()
    assert [answer.result().status_code for answer in answers] == [status, status]
    assert [job.attempt for job in system.encoder.jobs] == list(range(1, num_jobs + 1))
    await until(lambda: system.encoder.num_encodes == (status == 200))
    await assert_nothing_is_left(system, other)


def body() -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}


# ---- going away ------------------------------------------------------------------------------------
async def test_a_job_that_waits_goes_with_the_last_request_for_it(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.before_start.clear()
    async with asyncio.TaskGroup() as group:
        others = [Departing(system, group, (image_part(color),)) for color in range(10, 10 + PREFETCH)]
        assert await eventually(num_queued, system, PREFETCH)  # no encoder is free
        num_before = len(system.gateway.orders.flight_requests)
        first, second = Departing(system, group), Departing(other, group)
        await until(lambda: len(system.gateway.orders.flight_requests) > num_before)
        await until(lambda: len(other.gateway.orders.flight_requests))
        assert await eventually(num_queued, system, PREFETCH + 1)
        first.go_away()
        await until(lambda: len(system.gateway.orders.flight_requests) == num_before)
        assert await num_queued(system) == PREFETCH + 1  # the other still needs it
        second.go_away()
        assert await eventually(num_queued, system, PREFETCH)
        for each in others:
            each.go_away()
        await assert_nothing_is_left(system, other)
    assert system.encoder.jobs == []
    assert "gateway_encode_jobs_dropped_total 1.0" in (await other.http.get("/metrics")).text


async def test_a_job_that_an_encoder_took_but_did_not_start_is_dropped(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.before_start.clear()
    async with asyncio.TaskGroup() as group:
        client = Departing(system, group)
        assert await eventually(num_flights, system, 1)
        assert await eventually(num_queued, system, 1)
        client.go_away()
        await assert_nothing_is_left(system, other)
    system.encoder.before_start.set()
    await until(lambda: system.encoder.dropped == [StartResult.GONE] or system.encoder.jobs)
    assert system.encoder.num_encodes == 0
    assert (await system.ask([IMAGE])).choices  # and the picture can be had
    await until(lambda: system.encoder.num_encodes == 1)


async def test_a_job_that_runs_is_finished_into_the_cache(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.before_seal.clear()
    async with asyncio.TaskGroup() as group:
        client = Departing(system, group)
        await until(lambda: system.encoder.media)
        client.go_away()
        await system.assert_idle()
        system.encoder.before_seal.set()
        await until(lambda: system.encoder.num_encodes == 1)
    assert (await other.ask([IMAGE])).choices
    await until(lambda: system.encoder.num_encodes == 1)
    await assert_nothing_is_left(system, other)


# ---- losses ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["queued", "running"])
async def test_jobs_that_redis_lost_are_sent_again(pair: tuple[System, System], stage: str) -> None:
    system, _ = pair
    (system.encoder.before_start if stage == "queued" else system.encoder.before_metadata).clear()
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(each.ask([IMAGE])) for each in pair]
        assert await eventually(num_queued, system, 1)
        await until(lambda: all(len(each.gateway.orders.flight_requests) for each in pair))
        if stage == "running":
            await until(lambda: system.encoder.jobs)
        await system.bus.client.flushall()
        assert await eventually(num_queued, system, 1)
        system.encoder.before_start.set()
        system.encoder.before_metadata.set()
    assert all(answer.result().choices for answer in answers)
    assert system.encoder.num_encodes <= (1 if stage == "queued" else 2)
    assert len({job.job_id for job in system.encoder.jobs}) == 1
    await until(lambda: not any(len(each.gateway.orders.flight_requests) for each in pair))


async def test_a_result_that_never_came_is_asked_for_again(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.mute_jobs = 1
    assert (await system.ask([IMAGE])).choices
    assert (len(system.encoder.jobs), system.encoder.num_encodes) == (2, 1)
    assert len({job.job_id for job in system.encoder.jobs}) == 1
    await assert_nothing_is_left(system, other)


async def test_a_result_that_comes_while_a_later_request_looks_for_the_sizes_orders_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill_decode hears of the seal from its store, so an answer can end before its result is here."""
    await system.ask([IMAGE])
    (job,), orders = system.encoder.jobs, system.gateway.orders
    looks, go_on, find_all = asyncio.Event(), asyncio.Event(), orders.sizes.find_all

    async def find_slowly(*args: Any) -> Any:
        looks.set()
        await go_on.wait()
        return await find_all(*args)

    monkeypatch.setattr(orders.sizes, "find_all", find_slowly)
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([IMAGE]))
        await looks.wait()
        late = EncodeCompleted(job_id=job.job_id, mm_hash=job.mm_hash, encoder="encoder-0", encode_s=0.1)
        await orders.on_encode_result(late)
        go_on.set()
    assert len(system.encoder.jobs) == 1


async def test_results_that_never_came_stand_in_the_flight(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.loses_results = True
    assert (await system.ask([IMAGE])).choices
    await until(lambda: system.encoder.num_encodes)
    assert (len(system.encoder.jobs), system.encoder.num_encodes) == (1, 1)
    await assert_nothing_is_left(system, other)


async def test_a_job_that_vanishes_again_and_again_is_given_up(pair: tuple[System, System]) -> None:
    system, other = pair
    system.encoder.vanishing_jobs = 99
    answer = await system.post(body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "encode_failed")
    assert len(system.encoder.vanished) == single_flight.MAX_SENDS
    await assert_nothing_is_left(system, other)


async def test_a_gateway_that_dies_before_it_publishes_is_stood_in_for(
    pair: tuple[System, System], monkeypatch: pytest.MonkeyPatch
) -> None:
    system, other = pair
    system.encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        probe = group.create_task(system.ask([IMAGE]))  # to learn the hash
        await until(lambda: system.encoder.jobs)
        mm_hash = system.encoder.jobs[0].mm_hash
        probe.cancel()
    system.encoder.before_metadata.set()
    await assert_nothing_is_left(system, other)
    await forget_sizes(system)
    monkeypatch.setattr(single_flight, "PUBLISH_LEASE_S", 0.2)
    gone = Requester(request_id="gone", item_index=0, gateway="gone", prefill_decode="pd-0")
    claim = {"namespace_digest": DIGEST, "job_id": "job-gone", "attempt": 1, "max_attempts": 2, "ttl_s": 5}
    await SingleFlight(system.bus).claim_flight(mm_hash, [gone], mode="new", **claim)
    system.encoder.sealed.clear()
    assert (await other.ask([IMAGE])).choices
    assert system.encoder.jobs[-1].job_id == "job-gone"


# ---- too much --------------------------------------------------------------------------------------
@pytest.mark.parametrize("system", [{"max_queue_age_s": 0.1}], indirect=True)
async def test_a_queue_that_does_not_move_is_429(system: System) -> None:
    await until(lambda: system.gateway.view.encoding)
    system.encoder.before_start.clear()
    async with asyncio.TaskGroup() as group:
        clients = [Departing(system, group, (image_part(color),)) for color in range(PREFETCH + 1)]
        assert await eventually(num_queued, system, PREFETCH + 1)  # one more than the encoder takes
        assert await eventually(is_slow, system, True)
        with pytest.raises(openai.RateLimitError) as caught:
            await system.ask([image_part(99)])
        for client in clients:
            client.go_away()
        system.encoder.before_start.set()
    assert caught.value.code == "encode_queue_slow"
    assert caught.value.response.headers["retry-after"] == "1"
    await assert_nothing_is_left(system)


async def is_slow(system: System) -> bool:
    return merge_backlogs(await SingleFlight(system.bus).read_backlogs(DIGEST)).oldest_s >= 0.2
