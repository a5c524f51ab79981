"""Which instances a request goes to: whole or divided, and where after a failure."""

import time
from dataclasses import replace
from typing import Any

import pytest

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, KvTransfer, Modality, Role
from triptych_gateway.endpoints.endpoint import ServedBy
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.pairs import fits, pairs_of, serving_of, towers_of
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.routes import InstanceDemand, Route, RouteChoice, RouteMode, RouteReason, decide
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.variants import RouteDemand
from triptych_gateway.settings import RoutingSettings

KV = KvTransfer(connector="c", compatibility="x", lease_s=1.0)
DIGEST, OTHER = "0" * 64, "1" * 64
TEXT = InstanceDemand("m")
IMAGE = InstanceDemand("m", DIGEST, has_media=True)


def record(name: str, role: Role, **fields: Any) -> InstanceRecord:
    has_kv = role in (Role.PREFILL, Role.ENCODE_PREFILL, Role.DECODE)
    values: dict[str, Any] = {
        "boot_id": "b",
        "url": "http://x",
        "model": "m",
        "namespace_digest": DIGEST,
        "kv_transfer": KV if has_kv else None,
    } | fields
    return InstanceRecord(instance=name, role=role, **values)


def p(name: str = "p", **fields: Any) -> InstanceRecord:
    return record(name, Role.PREFILL, **fields)


def d(name: str = "d", **fields: Any) -> InstanceRecord:
    return record(name, Role.DECODE, **fields)


def pd(name: str = "pd", **fields: Any) -> InstanceRecord:
    return record(name, Role.PREFILL_DECODE, **fields)


def choice(records: list[InstanceRecord], demand: InstanceDemand = TEXT, **fields: Any) -> RouteChoice:
    registry: Any = None
    view = RegistryView(registry, 1.0)
    view.records = tuple(records)
    return RouteChoice(
        Instances(view, Router(2.0), RoutingSettings(instance_grace_s=1.0, max_dispatch_attempts=2)),
        demand,
        **fields,
    )


def shown(route: Route | None) -> tuple[str, str | None, str] | None:
    if route is None:
        return None
    decode = route.decode.instance if route.decode is not None else None
    return route.first.instance, decode, route.reason.value


@pytest.mark.parametrize(
    ("other", "is_pair"),
    [
        ({}, True),
        ({"kv_transfer": KV.model_copy(update={"lease_s": 9.0})}, True),
        ({"kv_transfer": KV.model_copy(update={"connector": "other"})}, False),
        ({"kv_transfer": KV.model_copy(update={"compatibility": "other"})}, False),
        ({"kv_transfer": None}, False),
        ({"namespace_digest": OTHER}, False),
        ({"model": "other"}, False),
        ({"model_version": "2"}, False),
        ({"draining": True}, False),
        ({"url": None}, False),
    ],
)
def test_pairs(other: dict[str, Any], is_pair: bool) -> None:
    records = [p(), d(**other)]
    assert bool(pairs_of(records)) is is_pair
    assert bool(serving_of(records, "m", ServingStage.PREFILL)) is is_pair
    assert bool(choice(records).instances.view.variants_of("m")) is is_pair
    assert (shown(choice(records).pick()) is not None) is is_pair


def test_an_adapter_needs_both_halves() -> None:
    both, one = p(adapters=("french", "dutch")), d(adapters=("french",))
    view = choice([both, one]).instances.view
    assert view.models == ["french", "m"]
    assert view.parent_of("french") == "m"
    assert shown(choice([both, one], InstanceDemand("french")).pick()) == ("p", "d", "no_whole")
    assert choice([both, one], InstanceDemand("dutch")).pick() is None


def test_what_encodes_itself() -> None:
    records = [p(), record("ep", Role.ENCODE_PREFILL), d(), record("epd", Role.ENCODE_PREFILL_DECODE)]
    assert [each.instance for each in towers_of(records, "m", DIGEST, {Modality.IMAGE})] == ["epd", "ep"]
    assert towers_of(records[1:2], "m", DIGEST, {Modality.IMAGE}) == ()
    assert towers_of(records, "m", DIGEST, {Modality.IMAGE, Modality.VIDEO}) == ()
    raw = InstanceDemand("m", DIGEST, has_media=True, needs_tower=True)
    assert shown(choice(records[:3], raw).pick()) == ("ep", "d", "no_whole")
    assert fits(records[1], records[2])


@pytest.mark.parametrize(
    ("whole", "pair", "expected"),
    [
        (None, None, None),
        ((False, 9), None, (RouteMode.WHOLE, RouteReason.NO_PAIR)),
        (None, (True, 9), (RouteMode.STAGED, RouteReason.NO_WHOLE)),
        ((False, 1), (False, 1), (RouteMode.WHOLE, RouteReason.LEAST_LOAD)),
        ((False, 2), (False, 1), (RouteMode.STAGED, RouteReason.LEAST_LOAD)),
        ((True, 0), (False, 5), (RouteMode.STAGED, RouteReason.LEAST_LOAD)),
    ],
)
def test_policy(whole: Any, pair: Any, expected: Any) -> None:
    assert decide(whole, pair) == expected


@pytest.mark.parametrize(
    ("records", "served_by", "has_media", "expected"),
    [
        ([pd(), p(), d()], ServedBy.ALONE, True, ("pd", None, "not_divided")),
        ([p(), d()], ServedBy.ALONE, False, ("d", None, "not_divided")),
        ([p(), d()], ServedBy.ALONE, True, "n"),
        ([p(), d()], ServedBy.WHOLE, False, "n"),
        ([p(), d()], ServedBy.ANY, True, ("p", None, "no_tokens")),
        ([pd()], ServedBy.WHOLE, True, ("pd", None, "not_divided")),
        ([pd()], ServedBy.ANY, True, ("pd", None, "no_tokens")),
        ([], ServedBy.ANY, True, None),
        ([], ServedBy.ALONE, True, None),
    ],
)
def test_what_is_not_divided(
    records: list[InstanceRecord], served_by: ServedBy, has_media: bool, expected: Any
) -> None:
    demand = InstanceDemand("m", None, served_by, "n", has_media)
    if expected != "n":
        assert shown(choice(records, demand).pick()) == expected
        return
    with pytest.raises(RequestError) as caught:
        choice(records, demand).pick()
    assert (caught.value.code, caught.value.param) == ("unsupported", "n")


def test_after_failures() -> None:
    asked = choice([p("p0"), p("p1"), d("d0"), d("d1")], IMAGE)
    first = asked.pick()
    assert shown(first) == ("p0", "d0", "no_whole")
    assert first is not None
    asked.on_handover_failed(first)
    assert shown(asked.pick()) == ("p1", "d1", "no_whole"), "others first"
    asked.on_unreachable(p("p1"))
    assert shown(asked.pick()) == ("p0", "d1", "no_whole"), "the doubtful one is better than none"
    asked.on_handover_failed(first)
    assert asked.pick() is None, "a bounded number of times"


def test_after_a_failed_handover_it_goes_whole() -> None:
    asked = choice([p(), d(), pd()], IMAGE)
    for _ in range(2):
        asked.instances.router.begin_request("pd")
    route = asked.pick()
    assert shown(route) == ("p", "d", "least_load")
    assert route is not None
    asked.on_handover_failed(route)
    assert shown(asked.pick()) == ("pd", None, "no_pair")
    asked.on_unreachable(pd())
    assert shown(asked.pick()) == ("p", "d", "no_whole")


def test_a_pair_is_better_than_an_instance_that_could_not_be_reached() -> None:
    asked = choice([p("p0"), p("p1"), d("d0"), d("d1"), pd()], IMAGE)
    asked.instances.router.avoid_instance("pd", time.monotonic())
    route = asked.pick()
    assert shown(route) == ("p0", "d0", "least_load")
    assert route is not None
    asked.on_handover_failed(route)
    assert shown(asked.pick()) == ("p1", "d1", "least_load")


def test_a_stored_response_whose_prefix_is_gone_is_asked_for_once() -> None:
    asked = choice([d()], only=d())
    route = asked.pick()
    assert shown(route) == ("d", None, "stored_response")
    assert route is not None
    asked.on_handover_failed(route)
    assert asked.pick() is None


def test_what_was_chosen_before_is_taken_unless_it_leaves() -> None:
    records = [p("p0"), p("p1"), d()]
    assert shown(choice(records, IMAGE, first=records[1]).pick()) == ("p1", "d", "no_whole")
    leaving = [records[0], p("p1", draining=True), d()]
    assert shown(choice(leaving, IMAGE, first=records[1]).pick()) == ("p0", "d", "no_whole")
    anew = [records[0], p("p1", boot_id="b2", model_version="2", namespace_digest=OTHER), d()]
    assert shown(choice(anew, IMAGE, first=records[1]).pick()) == ("p0", "d", "no_whole"), "another life"
    lost = [records[0], d()]
    assert shown(choice(lost, IMAGE, first=records[1]).pick()) == ("p1", "d", "no_whole"), "Redis lost it"
    assert choice(records[:2], IMAGE, first=records[1]).pick() is None


def test_who_holds_the_conversation_is_asked_once() -> None:
    asked = choice([p(), d("d0"), d("d1")], held_by=("d1", "b"))
    assert shown(asked.pick()) == ("d1", None, "prefix_held")
    assert shown(asked.pick()) == ("p", "d0", "no_whole")
    assert shown(choice([p(), d()], held_by=("d", "before")).pick()) == ("p", "d", "no_whole")


V2 = {"model_version": "2", "namespace_digest": OTHER}


def test_all_of_a_route_are_of_one_variant() -> None:
    records = [p("p1"), d("d1"), p("p2", **V2), d("d2", **V2)]
    variants = {each.version: each for each in choice(records).instances.view.variants_of("m")}
    assert {version: set(each.instances) for version, each in variants.items()} == {
        None: {"p1", "d1"},
        "2": {"p2", "d2"},
    }
    image = replace(IMAGE, namespace_digest=OTHER)
    asked = choice(records, image, variant=variants["2"])
    assert shown(asked.pick()) == ("p2", "d2", "no_whole")
    asked.on_unreachable(records[3])
    assert asked.pick() is None, "media keep to their variant"
    text = choice(records, TEXT, asked=RouteDemand(find_session=lambda: b"a"))
    first = text.pick()
    assert first is not None
    assert first.first.model_version == first.answering.model_version
    text.on_unreachable(first.answering)
    second = text.pick()
    assert second is not None
    assert {first.first.instance, second.first.instance} == {"p1", "p2"}, "text goes on to another"
    assert choice([p("p1"), d("d2", **V2)]).pick() is None


def test_dead_instances_of_one_version_do_not_keep_a_text_from_the_other() -> None:
    records = [pd("a1"), pd("b1"), pd("a2", **V2), pd("b2", **V2)]
    sessions = [RouteDemand(find_session=str(number).encode) for number in range(50)]
    for session in sessions:
        asked = choice(records, asked=session)
        first = asked.pick()
        assert first is not None
        if first.first.model_version == "2":
            break
    for number in range(3):
        route = asked.pick()
        assert route is not None
        assert (route.first.model_version == "2") is (number < 2), "both of the first one, then another"
        asked.on_unreachable(route.first)
    assert asked.pick() is None, "a further version gets one attempt"
    another = RouteChoice(asked.instances, TEXT, asked=session)
    route = another.pick()
    assert route is not None
    assert route.first.model_version is None, "the first one's were not reached a moment ago"


def test_a_conversation_is_not_taken_on_by_another_version() -> None:
    """The version is the one that the request asks for, whoever has answered so far."""
    records = [p("p1"), d("d1"), p("p2", **V2), d("d2", **V2)]
    own = choice(records, asked=RouteDemand(version="2"), held_by=("d2", "b"))
    assert shown(own.pick()) == ("d2", None, "prefix_held")
    other = choice(records, asked=RouteDemand(version="2"), held_by=("d1", "b"))
    assert shown(other.pick()) == ("p2", "d2", "no_whole")


@pytest.mark.parametrize(
    "demand", [RouteDemand(version="2"), RouteDemand(hosts={ServingStage.PREFILL: frozenset({"pd2:80"})})]
)
async def test_what_is_named_may_have_come_just_now(
    demand: RouteDemand, monkeypatch: pytest.MonkeyPatch
) -> None:
    instances = choice([pd()]).instances

    async def refresh() -> None:
        instances.view.records = (pd(), pd("pd2", url="http://pd2", **V2))

    monkeypatch.setattr(instances.view, "wait_for_refresh", refresh)
    await instances.check_demand("m", demand)


@pytest.mark.parametrize(("demand", "first"), [(TEXT, None), (IMAGE, p())])
async def test_a_registry_that_has_lost_everything_is_waited_for(
    demand: InstanceDemand, first: InstanceRecord | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They register one after the other. One that prefills and was chosen before needs another to decode."""
    asked = choice([p(), d()], demand, first=first)
    view = asked.instances.view
    view.models_seen.add("m")
    reads = iter([(), (), (p(),), (p(), d())])

    async def refresh() -> None:
        view.records = next(reads)

    monkeypatch.setattr(view, "wait_for_refresh", refresh)
    view.records = ()
    assert shown(await asked.next_route()) == ("p", "d", "no_whole")
    assert next(reads, None) is None


async def test_what_the_instances_that_are_there_cannot_do_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = choice([pd()], InstanceDemand("m", DIGEST, has_media=True, needs_tower=True))
    asked.instances.view.models_seen.add("m")
    num_reads = 0

    async def refresh() -> None:
        nonlocal num_reads
        num_reads += 1

    monkeypatch.setattr(asked.instances.view, "wait_for_refresh", refresh)
    with pytest.raises(RequestError) as caught:
        await asked.next_route()
    assert (caught.value.code, num_reads) == ("no_instance", 1)
