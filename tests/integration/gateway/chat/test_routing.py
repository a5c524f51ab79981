"""Two prefill_decodes behind a gateway: conversations stay where they are known, if that is no bad place."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.routing import load_of
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until
from triptych_gateway.gateway import run_gateway
from triptych_gateway.routing.scheduling.profiles import RoutingFileError
from triptych_gateway.settings import GatewaySettings

CHANCE = random.Random(4)
SYSTEM_TEXT = "You are told what to do. " * 10  # that all conversations begin with


@dataclass
class Pair:
    """`opened_system` with a second prefill_decode."""

    system: System
    fakes: tuple[FakePrefillDecode, FakePrefillDecode]

    async def ask(self, messages: list[Any], http: httpx.AsyncClient | None = None, **options: Any) -> str:
        """The name of the instance that answered."""
        before = [len(fake.bodies) for fake in self.fakes]
        body = {"model": MODEL, "messages": messages, **options.pop("fields", {})}
        answer = await (http or self.system.http).post("/v1/chat/completions", json=body, **options)
        assert answer.status_code == 200, answer.text
        (name,) = [fake.name for fake, num in zip(self.fakes, before, strict=True) if len(fake.bodies) > num]
        return name

    def name_of(self, instance: str) -> FakePrefillDecode:
        return next(fake for fake in self.fakes if fake.name == instance)

    async def announce(self, instance: str, **load: Any) -> None:
        """`instance` has this load, as the gateway knows then."""
        registration = self.name_of(instance).registration
        assert registration is not None
        await registration.update(load=load_of(**load))
        await self.system.refresh()
        router, view = self.system.gateway.router, self.system.gateway.view
        router.observe(view.records, asyncio.get_running_loop().time())


@pytest.fixture
async def pair(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Parametrise indirectly with the text of a file of routing profiles."""
    changes: dict[str, Any] = {}
    if hasattr(request, "param"):
        changes["routing_file"] = tmp_path / "routing.yaml"
        changes["routing_file"].write_text(request.param)
    first, second = FakePrefillDecode(), FakePrefillDecode(name="pd-1")
    async with opened_system(redis_url, tmp_path, first, **changes) as system, second.running(system.bus):
        await system.refresh()
        yield Pair(system, (first, second))
        await system.assert_idle()


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    with exported_spans(monkeypatch) as exporter:
        yield exporter


def conversation(num_chars: int = 4000, image: bool = False) -> list[Any]:
    """Its first turn, unlike all others behind the system's text."""
    text = CHANCE.randbytes(num_chars // 2).hex()
    content: Any = text
    if image:
        url = data_url(image_bytes(size=(8, CHANCE.randrange(8, 4000))))
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text[:40]}]
    return [{"role": "system", "content": SYSTEM_TEXT}, {"role": "user", "content": content}]


def next_turn(messages: list[Any]) -> list[Any]:
    more = [("assistant", "word0 word1"), ("user", CHANCE.randbytes(50).hex())]
    return [*messages, *({"role": role, "content": text} for role, text in more)]


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
async def test_conversations_stay_where_their_beginnings_are(pair: Pair, image: bool) -> None:
    turns = [conversation(image=image) for _ in range(4)]
    places: list[set[str]] = [set() for _ in turns]
    for _ in range(3):
        for index in CHANCE.sample(range(len(turns)), len(turns)):
            places[index].add(await pair.ask(turns[index]))
            turns[index] = next_turn(turns[index])
    assert all(len(place) == 1 for place in places), places
    assert set.union(*places) == {"pd-0", "pd-1"}, "new ones are shared out"


async def test_an_image_that_one_instance_had_goes_there_again(pair: Pair) -> None:
    """Also in a new conversation."""
    first = conversation(image=True)
    place = await pair.ask(first)
    assert await pair.ask(conversation()) != place
    content = [{"type": "text", "text": "A question before it"}, first[1]["content"][0]]
    assert await pair.ask([{"role": "user", "content": content}]) == place


async def test_a_session_is_the_same_instance_at_all_gateways(pair: Pair) -> None:
    hello = [{"role": "user", "content": "hello"}]
    async with another_gateway(pair.system, "gateway-1") as other:
        places = {}
        for number in range(8):
            headers = {"X-Session-Id": f"session {number}"}
            asked = [await pair.ask(hello, http, headers=headers) for http in (None, other.http) * 2]
            asked += [await pair.ask(hello, other.http, fields={"user": f"session {number}"})]
            asked += [await pair.ask(hello, fields={"prompt_cache_key": f"session {number}", "user": "x"})]
            assert len(set(asked)) == 1, asked
            places[number] = asked[0]
        assert set(places.values()) == {"pd-0", "pd-1"}


async def test_a_full_one_is_left(pair: Pair) -> None:
    turn = conversation()
    place = await pair.ask(turn)
    assert await pair.ask(turn) == place
    await pair.announce(place, num_beats=1, kv_usage=0.97)
    assert await pair.ask(turn) != place
    other = {"pd-0": "pd-1", "pd-1": "pd-0"}[place]
    await pair.announce(other, num_beats=1, kv_usage=0.99)
    turn = conversation()
    assert {await pair.ask(turn) for _ in range(3)} <= {"pd-0", "pd-1"}, "unless all are"


async def test_requests_of_other_gateways_count(pair: Pair) -> None:
    await pair.announce("pd-0", num_beats=1, num_running=3, num_waiting=2)
    assert [await pair.ask(conversation()) for _ in range(4)] == ["pd-1"] * 4
    await pair.announce("pd-0", num_beats=2)
    await pair.announce("pd-1", num_beats=1, num_waiting=5)
    assert [await pair.ask(conversation()) for _ in range(4)] == ["pd-0"] * 4


async def test_a_burst_of_one_conversation_is_spread_where_its_place_is_too_busy(pair: Pair) -> None:
    turn = conversation()
    place = await pair.ask(turn)
    for fake in pair.fakes:
        fake.behaviour = "hang"
    num_before = [len(fake.bodies) for fake in pair.fakes]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(pair.system.post({"model": MODEL, "messages": turn})) for _ in range(24)]
        await until(lambda: sum(len(fake.bodies) for fake in pair.fakes) == sum(num_before) + 24)
        for fake in pair.fakes:
            fake.release.set()
    assert {task.result().status_code for task in tasks} == {200}
    counts = {fake.name: len(fake.bodies) - num for fake, num in zip(pair.fakes, num_before, strict=True)}
    assert min(counts.values()) >= 6, counts
    assert counts[place] == max(counts.values()), "what is known still counts"


async def test_one_that_cannot_be_reached_is_left_though_the_conversation_is_its(
    redis_url: str, tmp_path: Path
) -> None:
    hello = [{"role": "user", "content": "hello"}]
    async with opened_system(redis_url, tmp_path, suspect_s=60.0) as system:
        async with FakePrefillDecode(name="pd-1").running_nowhere(system.bus):
            await system.refresh()
            answers = {}
            for number in range(8):
                before = num_decisions(system)
                headers = {"X-Session-Id": f"session {number}"}
                answer = await system.post({"model": MODEL, "messages": hello}, headers=headers)
                assert answer.status_code == 200, answer.text
                answers[number] = num_decisions(system) - before
        assert sum(each == 2 for each in answers.values()) == 1, (
            f"one was tried there, and no more: {answers}"
        )


def num_decisions(system: System) -> float:
    (family,) = system.gateway.services.metrics.routing_decisions.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_total"))


@pytest.mark.parametrize(
    "text", ["default: {weights: {prefx: 1}}", "default: {picker: [}", "nothing: {}"], ids=str
)
async def test_a_file_that_is_wrong_ends_the_start(redis_url: str, tmp_path: Path, text: str) -> None:
    path = tmp_path / "routing.yaml"
    path.write_text(text)
    settings = GatewaySettings(redis_url=redis_url, run_dir=tmp_path, routing_file=path)
    with pytest.raises(RoutingFileError, match=r"routing\.yaml"):
        async with run_gateway(settings):
            pytest.fail("it has started")


async def test_a_decision_is_explained(exported: InMemorySpanExporter, pair: Pair) -> None:
    for image in (False, True):
        turn = conversation(image=image)
        place = await pair.ask(turn)
        await pair.system.assert_idle()
        exported.clear()
        assert await pair.ask(turn) == place
        await pair.system.assert_idle()
        found = [dict(span.attributes or {}) for span in exported.get_finished_spans()]
        (said,) = [each for each in found if "triptych.routing" in each]
        assert said["triptych.routing_reason"] in ("prefix", "media")
        assert str(said["triptych.routing"]).startswith(f"{place} "), said
        assert "prefix 1.9" in str(said["triptych.routing"]) or image, said
    answer = await pair.system.http.get("/metrics")
    assert 'triptych_gateway_routing_decisions_total{reason="prefix",stage="whole"}' in answer.text
    assert "triptych_gateway_routing_prefix_share_count 4.0" in answer.text
