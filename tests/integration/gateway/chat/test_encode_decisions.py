"""Who encodes a request's media is decided before anything is ordered."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.hosts import TARGET, opened_hosts
from tests.support.gateway.local_encode import ANSWER, on_shared_cores, tower, without_encoders
from tests.support.gateway.samples import DIGEST, image_part
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import System
from tests.support.waiting import until
from triptych_common.domain.errors import RequestError
from triptych_common.domain.fair_queue import FairKey
from triptych_common.protocol.messages import FailureKind, Role
from triptych_gateway.decision.instance_load import NUM_PLACES
from triptych_gateway.decision.serving_costs import LinearCost, ServingCosts
from triptych_gateway.proxy import multimodal_request

TEXT = {"type": "text", "text": "what is this?"}
LOCAL = {"encode_decision": "local"}
AUTO = {"encode_decision": "auto"}


def count(system: System, way: str, reason: str) -> float:
    value = system.gateway.services.metrics.metrics.registry.get_sample_value(
        "triptych_gateway_encode_decisions_total", {"way": way, "reason": reason}
    )
    return value or 0.0


def is_whole(body: dict[str, Any]) -> bool:
    return "ec_transfer_params" not in body


def costs(system: System) -> ServingCosts:
    return system.gateway.services.media.decisions.namespace(DIGEST).costs


def learn(system: System, *, encode_s: float, local_s: float) -> None:
    """What the gateway would have seen of images of 64 rows, and nothing else."""
    learned, now = costs(system), time.monotonic()
    learned.on_sizes(64, 64)
    learned._encode, learned._local = LinearCost(), LinearCost()
    for _ in range(3):
        learned._encode.observe(64, encode_s, now)
        learned._local.observe(64, local_s, now)


def until_sealed(system: System) -> Callable[[Any], Any]:
    """Like the real one, prefill_decode answers when it has the tensors."""
    return lambda params: until(lambda: not any(item.in_flight for item in system.gateway.orders.table))


@pytest.mark.parametrize("system", [LOCAL], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_local_publishes_no_job(system: System, stream: bool) -> None:
    instance = await tower(system)
    answer = await system.ask([TEXT, image_part(3)], stream=stream)
    if stream:
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in answer]).strip() == ANSWER
    else:
        assert answer.choices[0].message.content == ANSWER
    assert [is_whole(body) for body in instance.bodies] == [True]
    assert system.prefill_decode.bodies == []
    assert system.encoder.jobs == []
    assert count(system, "local", "forced") == 1


async def test_the_default_leaves_media_to_encoders(system: System) -> None:
    instance = await tower(system)
    for number in range(4):
        await system.ask([TEXT, image_part(number)])
    assert not [body for body in (*instance.bodies, *system.prefill_decode.bodies) if is_whole(body)]
    assert count(system, "remote", "forced") == 4


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_unknown_costs_and_known_sizes_leave_them_to_encoders(system: System) -> None:
    await tower(system)
    await system.ask([TEXT, image_part(3)])
    assert count(system, "remote", "costs_unknown") == 1
    await system.ask([TEXT, image_part(3)])
    assert count(system, "remote", "sizes_known") == 1
    await until(lambda: system.encoder.num_encodes)  # the answers need the sizes alone
    assert system.encoder.num_encodes == 1


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_costs_are_learned_from_what_encoders_report(system: System) -> None:
    system.prefill_decode.waits_for = until_sealed(system)
    for number in range(3):
        async for _ in await system.ask([TEXT, image_part(number)], stream=True):
            pass
        async for _ in await system.ask("hello", stream=True):
            pass
    learned = costs(system).costs(time.monotonic())
    assert learned.encode is not None
    assert learned.prefill is not None
    assert costs(system).rows_of(64) == 64


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_the_quicker_way_is_taken(system: System) -> None:
    instance = await tower(system)
    learn(system, encode_s=1.0, local_s=0.1)
    await system.ask([TEXT, image_part(3)])
    assert count(system, "local", "too_small") == 1
    assert [is_whole(body) for body in instance.bodies] == [True]
    learn(system, encode_s=0.01, local_s=1000.0)
    await system.ask([TEXT, image_part(4)])
    assert count(system, "remote", "below_break_even") == 1
    assert len(system.encoder.jobs) == 1


@pytest.mark.parametrize(
    ("bytes_per_s", "transfer_s", "way", "reason"),
    [(1e12, 0.001, "remote", "below_break_even"), (1e3, 1.0, "local", "encoders_far")],
)
async def test_the_way_from_encoders_at_another_store_counts(
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_s: float,
    transfer_s: float,
    way: str,
    reason: str,
) -> None:
    link = {"link_bytes_per_s": bytes_per_s, "link_round_trip_s": 0.001}
    with exported_spans(monkeypatch) as spans:
        async with opened_hosts(redis_url, tmp_path, **AUTO, **link) as hosts:
            await tower(hosts.system, store=TARGET)
            learn(hosts.system, encode_s=0.1, local_s=0.3)
            await hosts.system.ask([TEXT, image_part(3)])
            assert count(hosts.system, way, reason) == 1
            assert hosts.num_encodes == (way == "remote")
    (found,) = (dict(each.attributes or {}) for each in spans.get_finished_spans() if each.parent is None)
    assert found["triptych.decision_reason"] == reason
    told_s = found["triptych.decision.transfer_s"]
    assert isinstance(told_s, float)
    assert told_s == pytest.approx(transfer_s, rel=0.01) if way == "remote" else told_s >= transfer_s
    predicted_s = found["triptych.predicted_remote_s"]
    assert isinstance(predicted_s, float)
    assert predicted_s >= found["triptych.decision.encode_s"] + told_s  # type: ignore[operator]


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_a_queue_before_the_encoders_is_avoided(system: System) -> None:
    """One request has its job; the second joins it; the third is encoded by the instance."""
    instance = await tower(system)
    learn(system, encode_s=1.0, local_s=1.2)
    system.encoder.before_seal.clear()
    system.prefill_decode.waits_for = instance.waits_for = until_sealed(system)
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: count(system, "remote", "below_break_even"))
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: count(system, "remote", "in_flight") + count(system, "remote", "sizes_known"))
        await system.ask([TEXT, image_part(5)])
        assert count(system, "local", "encoders_slower") == 1
        await until(lambda: len(system.encoder.jobs) == 1)
        system.encoder.before_seal.set()


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_small_images_on_shared_cores_are_encoded_where_they_are_needed_unless_text_is_there(
    system: System,
) -> None:
    instance = await tower(system)
    await on_shared_cores(system)
    learn(system, encode_s=0.01, local_s=0.02)
    load = system.gateway.services.media.decisions.load
    load.begin_work(instance.name, time.monotonic(), 1.0)  # something is under way
    await asyncio.gather(*(system.ask([TEXT, image_part(number)]) for number in range(NUM_PLACES + 8)))
    assert count(system, "local", "too_small") == NUM_PLACES + 8
    assert system.encoder.jobs == []
    load.begin_text(instance.name)
    await system.ask([TEXT, image_part(99)])
    assert count(system, "remote", "shared_compute") == 1
    load.end_text(instance.name)
    learn(system, encode_s=0.1, local_s=0.02)
    await system.ask([TEXT, image_part(98)])
    assert count(system, "remote", "shared_compute") == 2
    assert system.gateway.services.media.decisions._room.num_requests(instance.name) == 0


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_what_waited_for_room_goes_to_encoders_if_a_text_has_come(system: System) -> None:
    instance = await tower(system)
    await on_shared_cores(system)
    learn(system, encode_s=0.01, local_s=0.02)
    decisions = system.gateway.services.media.decisions
    decisions.load.begin_work(instance.name, time.monotonic(), 1.0)
    deadline = time.monotonic() + 60
    places = [await decisions._room.take_place(instance.name, FairKey(), deadline) for _ in range(NUM_PLACES)]
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: decisions._room.num_held(instance.name) == 1)
        assert (system.encoder.jobs, instance.bodies) == ([], [])
        decisions.load.begin_text(instance.name)
        places[0].leave()
    assert count(system, "remote", "shared_compute") == 1
    assert decisions._room.num_requests(instance.name) == NUM_PLACES - 1
    for place in places:
        place.leave()


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_whole_answers_keep_no_place_after_their_predicted_first_token(system: System) -> None:
    """More of them than there are places are at the instance, whatever time each takes."""
    instance = await tower(system)
    await on_shared_cores(system)
    learn(system, encode_s=0.01, local_s=0.02)
    instance.behaviour = "hang"
    system.gateway.services.media.decisions.load.begin_work(instance.name, time.monotonic(), 0.1)
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_PLACES + 2):
            group.create_task(system.ask([TEXT, image_part(number)]))
        await until(lambda: len(instance.bodies) == NUM_PLACES + 2)
        instance.release.set()


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_what_waited_for_room_takes_a_place_at_the_instance_that_gets_it(system: System) -> None:
    first = await tower(system, "pd-first")
    await on_shared_cores(system)
    learn(system, encode_s=0.01, local_s=0.02)
    decisions = system.gateway.services.media.decisions
    decisions.load.begin_work(first.name, time.monotonic(), 1.0)
    deadline = time.monotonic() + 60
    places = [await decisions._room.take_place(first.name, FairKey(), deadline) for _ in range(NUM_PLACES)]
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: decisions._room.num_held(first.name) == 1)
        second = await tower(system, "pd-second")
        second.behaviour = "hang"
        decisions.load.begin_work(second.name, time.monotonic(), 1.0)
        for _ in range(3):
            system.gateway.router.begin_request(first.name, None)
        places[0].leave()
        await until(lambda: second.bodies)
        assert decisions._room.num_requests(first.name) == NUM_PLACES - 1
        assert decisions._room.num_requests(second.name) == 1
        second.release.set()
    for place in places:
        place.leave()


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_a_request_that_goes_to_encoders_after_all_keeps_no_place(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RequestError(503, "overloaded", "no room for raw media")

    instance = await tower(system)
    await on_shared_cores(system)
    learn(system, encode_s=0.01, local_s=0.02)
    decisions = system.gateway.services.media.decisions
    decisions.load.begin_work(instance.name, time.monotonic(), 1000.0)
    system.gateway.router.begin_request(instance.name, None)  # the next one goes to the other instance
    monkeypatch.setattr(multimodal_request, "book_whole", refuse)
    system.prefill_decode.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: system.prefill_decode.bodies)
        assert count(system, "local", "too_small") == 1
        assert decisions._room.num_requests(instance.name) == 0
        system.prefill_decode.release.set()


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_an_idle_instance_is_tried_while_others_have_requests(system: System) -> None:
    """Its compute is its own: what it takes for an encode is the same beside requests elsewhere."""
    instance = await tower(system)
    learn(system, encode_s=0.1, local_s=1000.0)
    system.gateway.router.begin_request(instance.name, None)  # the next one goes to the other instance
    system.prefill_decode.behaviour = "hang"
    async with asyncio.TaskGroup() as group:
        group.create_task(system.ask([TEXT, image_part(3)]))
        await until(lambda: system.prefill_decode.bodies)
        costs(system)._local = LinearCost()  # not measured yet
        system.gateway.services.media.decisions.namespace(DIGEST).policy._num_decided = 1000
        async for _ in await system.ask([TEXT, image_part(5)], stream=True):
            pass
        system.prefill_decode.release.set()
    assert count(system, "local", "exploration") == 1


@pytest.mark.parametrize("system", [AUTO], indirect=True)
async def test_the_next_turn_stays_where_its_images_were_encoded(system: System) -> None:
    instance = await tower(system)
    learn(system, encode_s=1.0, local_s=0.1)
    await system.ask([TEXT, image_part(3)])
    learn(system, encode_s=0.01, local_s=1000.0)
    first = {"role": "user", "content": [TEXT, image_part(3)]}
    turns = [first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and now?"}]
    await system.post({"model": "fake-vl", "messages": turns})
    assert [is_whole(body) for body in instance.bodies] == [True, True]
    assert system.encoder.jobs == []
    # The same image in another prompt is not in its prefix cache.
    await system.ask([image_part(3), TEXT])
    assert len(system.encoder.jobs) == 1


@pytest.mark.parametrize("system", [LOCAL], indirect=True)
async def test_a_local_encode_that_fails_is_left_to_encoders(system: System) -> None:
    instance = await tower(system)
    instance.behaviour = "busy"
    answer = await system.ask([TEXT, image_part(3)])
    assert answer.choices[0].message.content == ANSWER
    assert len(system.encoder.jobs) == 1
    assert sum(map(is_whole, instance.bodies)) == 1
    assert [is_whole(body) for body in system.prefill_decode.bodies] == [False]


@pytest.mark.parametrize("system", [LOCAL], indirect=True)
async def test_each_way_is_tried_once(system: System) -> None:
    instance = await tower(system)
    instance.behaviour = "busy"
    system.encoder.failures = [FailureKind.ENCODER_ERROR] * 2
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([TEXT, image_part(3)])
    assert caught.value.code == "encode_failed"
    assert sum(map(is_whole, instance.bodies)) == 1


@pytest.mark.parametrize("system", [LOCAL], indirect=True)
async def test_a_refusal_by_the_instance_is_final(system: System) -> None:
    """Nothing that encoders could do better."""
    instance = await tower(system)
    instance.behaviour = "refuse"
    with pytest.raises(openai.BadRequestError):
        await system.ask([TEXT, image_part(3)])
    assert system.encoder.jobs == []


@pytest.mark.parametrize(
    "system",
    [LOCAL | {"request_processor_options": {"max_pixels": {"min": 4, "max": 4096}}}],
    indirect=True,
)
async def test_media_with_options_are_for_encoders_alone(system: System) -> None:
    instance = await tower(system)
    await system.ask([TEXT, image_part(3)], extra_body={"mm_processor_kwargs": {"max_pixels": 4096}})
    assert not [body for body in (*instance.bodies, *system.prefill_decode.bodies) if is_whole(body)]
    assert count(system, "remote", "for_encoders") == 1


@pytest.mark.parametrize("system", [{"encoder_grace_s": 60.0}], indirect=True)
async def test_where_there_never_was_an_encoder_none_is_waited_for(system: System) -> None:
    """The wait would be longer than the request may take."""
    await without_encoders(system)
    alone = FakePrefillDecode("a-tower", role=Role.ENCODE_PREFILL_DECODE, digest="e" * 64)
    await system.stack.enter_async_context(alone.running(system.bus))
    await system.refresh()
    answer = await system.ask([TEXT, image_part(3)])
    assert answer.choices[0].message.content == ANSWER
    assert count(system, "local", "no_encoder") == 1
    assert [is_whole(body) for body in alone.bodies] == [True]


@pytest.mark.parametrize("system", [AUTO | {"encoder_grace_s": 0.2}], indirect=True)
async def test_an_encoder_that_restarts_is_waited_for(system: System) -> None:
    instance = await tower(system)
    await without_encoders(system)
    answer = await system.ask([TEXT, image_part(3)])
    assert answer.choices[0].message.content == ANSWER
    assert count(system, "remote", "encoder_returns") == 1
    assert [is_whole(body) for body in (*instance.bodies, *system.prefill_decode.bodies)] == [True]


# ---- asked for by a header -------------------------------------------------------------------------
def asked(way: str) -> dict[str, Any]:
    return {"extra_headers": {"X-Triptych-Encode": way}}


@pytest.mark.parametrize("system", [{"encode_override": "all"}], indirect=True)
async def test_a_request_says_whose_encode_it_gets(system: System) -> None:
    instance = await tower(system)
    await system.ask([TEXT, image_part(1)], **asked("local"))
    await system.ask([TEXT, image_part(2)], **asked("remote"))
    await system.ask([TEXT, image_part(3)], **asked("auto"))
    assert count(system, "local", "requested") == 1
    assert count(system, "remote", "requested") == 1
    assert count(system, "remote", "costs_unknown") + count(system, "remote", "below_break_even") == 1
    assert [is_whole(body) for body in instance.bodies].count(True) == 1
    with pytest.raises(openai.BadRequestError) as caught:
        await system.ask([TEXT, image_part(4)], **asked("mine"))
    assert caught.value.code == "invalid_value"


async def test_it_may_not_unless_the_operator_allows_it_and_text_is_not_asked(system: System) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await system.ask([TEXT, image_part(1)], **asked("local"))
    assert caught.value.code == "encode_override_not_allowed"
    assert (await system.ask("text", **asked("local"))).choices
    assert system.encoder.jobs == []
    names = system.gateway.services.metrics.metrics.registry.collect()
    decided = [s for m in names for s in m.samples if s.name == "triptych_gateway_encode_decisions_total"]
    assert not decided, "nothing was decided: neither for the refused one nor for text"


@pytest.mark.parametrize("system", [{"encode_override": "all"}], indirect=True)
async def test_local_is_refused_where_no_instance_can(system: System) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await system.ask([TEXT, image_part(1)], **asked("local"))
    assert caught.value.code == "encode_override_impossible"
    assert system.encoder.jobs == []
