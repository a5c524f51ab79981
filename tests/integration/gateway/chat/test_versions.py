"""Several models and several versions behind one gateway: which requests go where, and what is kept apart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, entry, image_part, write_keys
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until

OTHER = "a" * 64  # another namespace
ANOTHER_MODEL = "other-vl"
NEARLY_ALL = {"1": 1, "2": 1_000_000}


def written(path: Path, **content: Any) -> Path:
    """A file of models, changed in one step."""
    new = path.with_suffix(".new")
    new.write_text(yaml.safe_dump(content))
    return new.rename(path)


def body(text: str, color: int | None = None, model: str = MODEL) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if color is not None:
        content.insert(0, image_part(color))
    return {"model": model, "messages": [{"role": "user", "content": content}]}


def items_of(fake: FakePrefillDecode) -> list[str]:
    """Names of the items that it was sent."""
    return [item["mm_hash"] for sent in fake.bodies for item in sent["ec_transfer_params"]["items"]]


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@asynccontextmanager
async def versions(
    redis_url: str, run_dir: Path, shares: dict[str, int] | None = None, **changes: Any
) -> AsyncIterator[tuple[System, FakePrefillDecode, FakeEncoder, AsyncExitStack]]:
    """The system is version 1; and version 2, of another namespace, which ends with the stack."""
    if shares is not None:
        changes["models_file"] = written(run_dir / "models.yaml", shares={MODEL: shares})
    first = FakePrefillDecode(model_version="1")
    async with (
        opened_system(redis_url, run_dir, first, **changes) as system,
        AsyncExitStack() as stack,
    ):
        encoder = FakeEncoder(system.bus, "encoder-1", OTHER)
        await stack.enter_async_context(encoder.running())
        second = FakePrefillDecode(name="pd-1", digest=OTHER, model_version="2")
        await stack.enter_async_context(second.running(system.bus))
        await system.refresh()
        yield system, second, encoder, stack


async def test_two_models_at_once(redis_url: str, tmp_path: Path) -> None:
    """The same image asked of both: each has an item, a job and a tensor of its own."""
    async with opened_system(redis_url, tmp_path) as system:
        encoder = FakeEncoder(system.bus, "encoder-1", OTHER)
        other = FakePrefillDecode(name="pd-1", digest=OTHER, model=ANOTHER_MODEL)
        async with encoder.running(), other.running(system.bus):
            await system.refresh()
            assert [card.id for card in (await system.openai.models.list()).data] == [MODEL, ANOTHER_MODEL]
            for _ in range(2):
                for model in (MODEL, ANOTHER_MODEL):
                    answer = await system.post(body("what is it", 1, model))
                    assert answer.status_code == 200, answer.text
            assert [sent["model"] for sent in other.bodies] == [ANOTHER_MODEL] * 2
            assert [sent["model"] for sent in system.prefill_decode.bodies] == [MODEL] * 2
            own, others = set(items_of(system.prefill_decode)), set(items_of(other))
            assert (len(own), len(others)) == (1, 1)
            assert own.isdisjoint(others)
            assert {job.mm_hash for job in system.encoder.jobs} == system.encoder.sealed == own
            assert {job.mm_hash for job in encoder.jobs} == encoder.sealed == others
            metrics = (await system.http.get("/metrics")).text
            for digest in ("f" * 64, OTHER):
                assert (
                    f'triptych_gateway_encode_jobs_pending{{namespace="{digest}",store="store-0"}}' in metrics
                )


async def test_an_encode_of_one_model_does_not_wait_for_the_others(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path) as system:
        encoder = FakeEncoder(system.bus, "encoder-1", OTHER)
        other = FakePrefillDecode(name="pd-1", digest=OTHER, model=ANOTHER_MODEL)
        async with encoder.running(), other.running(system.bus):
            await system.refresh()
            system.encoder.before_metadata.clear()
            slow = asyncio.get_running_loop().create_task(system.post(body("slow", 1)))
            await until(lambda: bool(system.encoder.jobs))
            assert (await system.post(body("quick", 1, ANOTHER_MODEL))).status_code == 200
            system.encoder.before_metadata.set()
            assert (await slow).status_code == 200


async def test_conversations_keep_their_version_and_shares_change_while_it_runs(
    redis_url: str, tmp_path: Path
) -> None:
    async with versions(redis_url, tmp_path, {"1": 50, "2": 50}, models_check_s=0.05) as (
        system, second, _, _,
    ):  # fmt: skip
        first = system.prefill_decode
        for number in range(16):
            before = len(first.bodies), len(second.bodies)
            for text in ("and", "now"):
                turns = body(f"talk {number}")
                turns["messages"] += [
                    {"role": "assistant", "content": "yes"},
                    *body(text, number)["messages"],
                ]
                assert (await system.post(turns)).status_code == 200
            moved = len(first.bodies) - before[0], len(second.bodies) - before[1]
            assert moved in ((2, 0), (0, 2)), "a conversation does not change its version"
        assert len(first.bodies) >= 4
        assert len(second.bodies) >= 4
        assert set(items_of(first)).isdisjoint(items_of(second))
        metrics = (await system.http.get("/metrics")).text
        for version, fake in (("1", first), ("2", second)):
            labels = f'model="{MODEL}",reason="share",version="{version}"'
            assert f"triptych_gateway_version_answers_total{{{labels}}} {len(fake.bodies)}.0" in metrics
        written(tmp_path / "models.yaml", shares={MODEL: {"2": 1}})
        await until(lambda: system.gateway.services.instances.models.content.shares == {MODEL: {"2": 1}})
        num_before = len(first.bodies)
        for number in range(16):
            assert (await system.post(body(f"talk {number}", number % 2 or None))).status_code == 200
        assert len(first.bodies) == num_before


async def test_a_file_that_becomes_unusable_leaves_the_former_in_force(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "models.yaml", aliases={"gpt-4o": MODEL})
    async with opened_system(redis_url, tmp_path, models_file=path, models_check_s=0.05) as system:
        written(path, aliases="none")
        await until(lambda: "the former one stays in force" in caplog.text)
        assert (await system.post(body("hello", model="gpt-4o"))).status_code == 200


async def test_a_caller_names_a_version(redis_url: str, tmp_path: Path) -> None:
    path = written(tmp_path / "models.yaml", version_header=True, shares={MODEL: {"1": 1, "3": 1}})
    async with versions(redis_url, tmp_path, models_file=path, instance_grace_s=0.2) as (system, second, *_):
        for color in (None, 1):
            for _ in range(3):
                answer = await system.post(body("hello", color), headers={"X-Triptych-Version": "2"})
                assert answer.status_code == 200, answer.text
        assert len(second.bodies) == 6, "whatever its share"
        assert (await system.post(body("hello"))).status_code == 200
        assert len(system.prefill_decode.bodies) == 1
        unknown = await system.post(body("hello"), headers={"X-Triptych-Version": "4"})
        assert code_of(unknown) == (400, "unknown_version")
        away = await system.post(body("hello"), headers={"X-Triptych-Version": "3"})
        assert code_of(away) == (503, "no_instance")


async def test_a_version_is_not_named_where_that_is_not_allowed(redis_url: str, tmp_path: Path) -> None:
    async with versions(redis_url, tmp_path) as (system, *_):
        refused = await system.post(body("hello"), headers={"X-Triptych-Version": "2"})
        assert code_of(refused) == (403, "header_not_allowed")


async def test_a_version_whose_instance_leaves_before_the_dispatch(redis_url: str, tmp_path: Path) -> None:
    """The request is done again in the other one, its items named and encoded there."""
    async with versions(redis_url, tmp_path, NEARLY_ALL) as (system, second, encoder, stack):
        encoder.before_metadata.clear()
        asking = asyncio.get_running_loop().create_task(system.post(body("what is it", 1)))
        await until(lambda: bool(encoder.jobs))
        await stack.aclose()
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert not second.bodies
        assert [job.mm_hash for job in system.encoder.jobs] == items_of(system.prefill_decode)
        assert items_of(system.prefill_decode) != [job.mm_hash for job in encoder.jobs]
        metrics = (await system.http.get("/metrics")).text
        assert f'version_answers_total{{model="{MODEL}",reason="left",version="1"}} 1.0' in metrics


async def test_a_version_whose_encoder_leaves_its_jobs(redis_url: str, tmp_path: Path) -> None:
    """Its instance lives on, and has no sizes to be sent with."""
    shares = written(tmp_path / "models.yaml", shares={MODEL: NEARLY_ALL})
    first = FakePrefillDecode(model_version="1")
    second = FakePrefillDecode(name="pd-1", digest=OTHER, model_version="2")
    async with (
        opened_system(redis_url, tmp_path, first, models_file=shares) as system,
        second.running(system.bus),
    ):
        encoder = FakeEncoder(system.bus, "encoder-1", OTHER, vanishing_jobs=1)
        async with encoder.running():
            await system.refresh()
            asking = asyncio.get_running_loop().create_task(system.post(body("what is it", 1)))
            await until(lambda: bool(encoder.vanished))
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert not second.bodies
        assert [job.mm_hash for job in system.encoder.jobs] == items_of(first)


async def test_a_version_whose_instances_have_left_gets_nothing(redis_url: str, tmp_path: Path) -> None:
    async with versions(redis_url, tmp_path, NEARLY_ALL) as (system, second, _, stack):
        for color in (None, 1):
            assert (await system.post(body("hello", color))).status_code == 200
        assert len(second.bodies) == 2
        await stack.aclose()
        for color in (None, 1):  # the gateway has not read the registry since
            answer = await system.post(body("hello", color))
            assert answer.status_code == 200, answer.text
        await system.refresh()
        for color in (None, 1):
            assert (await system.post(body("hello", color))).status_code == 200
        assert (len(second.bodies), len(system.prefill_decode.bodies)) == (2, 4)


async def test_media_go_to_a_version_that_has_an_encoder(redis_url: str, tmp_path: Path) -> None:
    """Text goes by the shares all the same."""
    shares = written(tmp_path / "models.yaml", shares={MODEL: NEARLY_ALL})
    first = FakePrefillDecode(model_version="1")
    second = FakePrefillDecode(name="pd-1", digest=OTHER, model_version="2")
    async with (
        opened_system(redis_url, tmp_path, first, models_file=shares) as system,
        second.running(system.bus),
    ):
        await system.refresh()
        for color in (1, None):
            assert (await system.post(body("hello", color))).status_code == 200
        assert (len(first.bodies), len(second.bodies)) == (1, 1)


async def test_aliases(redis_url: str, tmp_path: Path) -> None:
    """Instances see the name that they serve, and so do callers in the answer, as with vLLM."""
    path = written(tmp_path / "models.yaml", aliases={"gpt-4o": MODEL, "parlez": "french", "none": "away"})
    fake = FakePrefillDecode(adapters=("french",), stores_responses=True)
    async with opened_system(redis_url, tmp_path, fake, models_file=path) as system:
        cards = {
            card.id: (card.model_extra or {})["parent"] for card in (await system.openai.models.list()).data
        }
        assert cards == {MODEL: None, "gpt-4o": None, "french": MODEL, "parlez": MODEL}
        assert (await system.openai.models.retrieve("gpt-4o")).id == "gpt-4o"
        for color in (None, 1):
            answer = await system.post(body("hello", color, "gpt-4o"))
            assert answer.json()["model"] == MODEL
        prompt = await system.http.post("/v1/completions", json={"model": "parlez", "prompt": "hello"})
        assert prompt.status_code == 200, prompt.text
        assert [sent["model"] for sent in fake.bodies] == [MODEL, MODEL, "french"]
        hidden = body("look: <|image_pad|>", None, "gpt-4o")
        assert code_of(await system.post(hidden)) == (400, "placeholder_in_text")
        assert code_of(await system.post(body("hello", None, "none"))) == (404, "model_not_found")
        made = await system.openai.responses.create(model="gpt-4o", input="hello")
        again = await system.openai.responses.create(
            model="gpt-4o", input="more", previous_response_id=made.id
        )
        assert again.id != made.id


async def test_aliases_and_keys(redis_url: str, tmp_path: Path) -> None:
    """A key for a model may use its aliases; one for an alias may not use the model's own name."""
    path = written(tmp_path / "models.yaml", aliases={"gpt-4o": MODEL})
    keys = write_keys(
        tmp_path / "keys.toml",
        entry("model", "key-model", models=[MODEL]),
        entry("alias", "key-alias", models=["gpt-4o"]),
        entry("other", "key-other", models=["other"]),
    )
    async with opened_system(redis_url, tmp_path, models_file=path, api_keys_file=keys) as system:

        async def ask(key: str, model: str) -> int:
            headers = {"Authorization": f"Bearer key-{key}"}
            return (await system.post(body("hello", None, model), headers=headers)).status_code

        async def listed(key: str) -> list[str]:
            headers = {"Authorization": f"Bearer key-{key}"}
            return [
                each["id"] for each in (await system.http.get("/v1/models", headers=headers)).json()["data"]
            ]

        assert [await ask("model", name) for name in (MODEL, "gpt-4o")] == [200, 200]
        assert [await ask("alias", name) for name in (MODEL, "gpt-4o")] == [404, 200]
        assert [await ask("other", name) for name in (MODEL, "gpt-4o")] == [404, 404]
        assert [await listed(key) for key in ("model", "alias", "other")] == [
            [MODEL, "gpt-4o"],
            ["gpt-4o"],
            [],
        ]
        named = await system.http.get(f"/v1/models/{MODEL}", headers={"Authorization": "Bearer key-other"})
        assert code_of(named) == (404, "model_not_found")
        unnamed = await system.http.post(
            "/v1/completions", json={"prompt": "hello"}, headers={"Authorization": "Bearer key-alias"}
        )
        assert unnamed.status_code == 200, unnamed.text


async def test_instances_named_by_a_front_end(redis_url: str, tmp_path: Path) -> None:
    """As llm-d's router names them. No address is dialled that is no instance's."""
    keys = write_keys(tmp_path / "keys.toml", entry("router", "key-router"), entry("alice", "key-alice"))
    options: dict[str, Any] = {"api_keys_file": keys, "front_end_keys": ("router",)}
    async with (
        opened_system(redis_url, tmp_path, **options) as system,
        FakePrefillDecode(name="pd-1").running(system.bus) as second,
        FakePrefillDecode(name="pd-2", model=ANOTHER_MODEL).running(system.bus) as others,
    ):
        await system.refresh()

        async def ask(value: str, key: str = "router", **more: str) -> httpx.Response:
            headers = {"Authorization": f"Bearer key-{key}", "x-prefiller-host-port": value, **more}
            return await system.post(body("hello", 1), headers=headers)

        for _ in range(4):
            assert (await ask(f"127.0.0.1:{second.port}")).status_code == 200
        assert (len(second.bodies), len(system.prefill_decode.bodies)) == (4, 0)
        assert (await ask(f"127.0.0.1:{second.port}", "alice")).status_code == 403
        for unknown in ("127.0.0.1:1", f"127.0.0.1:{others.port}", f"localhost:{second.port}"):
            assert code_of(await ask(unknown)) == (400, "unknown_instance")
        at = f"127.0.0.1:{second.port}"
        first = f"127.0.0.1:{system.prefill_decode.port}"
        both = {"x-data-parallel-host-port": first}
        assert code_of(await ask(at, **both)) == (400, "unknown_instance"), "no instance is both"
        assert (await ask(f"{at},{first}", **both)).status_code == 200
        assert len(system.prefill_decode.bodies) == 1
        assert not others.bodies
