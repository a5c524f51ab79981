"""LoRA adapters: named by clients like models, served by the instances that have them, gone when unloaded."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.protocol.messages import Modality

IMAGE = image_part()
USER = {"role": "user", "content": "read"}


async def named(system: System, model: str | None, path: str = "/v1/chat/completions") -> httpx.Response:
    inputs: dict[str, Any] = {"messages": [USER]} if path.startswith("/v1/chat") else {"prompt": "read"}
    return await system.http.post(path, json=inputs if model is None else {"model": model, **inputs})


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_an_adapter_is_a_model_of_its_own(redis_url: str, tmp_path: Path) -> None:
    """Its requests go to the instance that has it alone, images too; that one still serves the model."""
    fake = FakePrefillDecode(adapters=("french", "dutch"))
    async with (
        opened_system(redis_url, tmp_path, fake) as system,
        FakePrefillDecode(name="pd-1").running(system.bus) as other,
    ):
        await system.refresh()
        cards = {card.id: card for card in (await system.openai.models.list()).data}
        assert {name: (card.model_extra or {})["parent"] for name, card in cards.items()} == {
            MODEL: None,
            "french": MODEL,
            "dutch": MODEL,
        }
        assert (await system.openai.models.retrieve("french")).id == "french"
        for _ in range(4):
            assert (await named(system, "french")).status_code == 200
        content = [{"type": "text", "text": "read"}, IMAGE]
        body = {"model": "dutch", "messages": [{"role": "user", "content": content}]}
        answer = await system.post(body)
        assert answer.status_code == 200, answer.text
        assert [sent["model"] for sent in fake.bodies] == ["french"] * 4 + ["dutch"]
        assert not other.bodies
        for _ in range(2):
            assert (await named(system, MODEL)).status_code == 200
        assert [sent["model"] for sent in other.bodies] == [MODEL]


async def test_readiness_which_needs_no_key_has_their_number_alone(redis_url: str, tmp_path: Path) -> None:
    fake = FakePrefillDecode(adapters=("french", "dutch"))
    async with opened_system(redis_url, tmp_path, fake, api_keys=("secret",)) as system:
        ready = await system.http.get("/health/ready")
        assert {each["instance"]: each["num_adapters"] for each in ready.json()["instances"]}["pd-0"] == 2
        assert "french" not in ready.text
        assert "dutch" not in ready.text


async def test_readiness_has_the_modalities_that_are_not_served(redis_url: str, tmp_path: Path) -> None:
    unserved = {Modality.VIDEO: "no video fits"}
    async with opened_system(redis_url, tmp_path) as system:
        encoder = FakeEncoder(system.bus, name="encoder-1", unserved_modalities=unserved)
        async with encoder.running():
            await system.refresh()
            ready = (await system.http.get("/health/ready")).json()
    shown = {each["instance"]: each["unserved_modalities"] for each in ready["instances"]}
    assert shown["encoder-1"] == {"video": "no video fits"}


async def test_a_request_without_a_model_means_no_adapter(redis_url: str, tmp_path: Path) -> None:
    fake = FakePrefillDecode(adapters=("french",))
    async with opened_system(redis_url, tmp_path, fake) as system:
        assert (await named(system, None, "/v1/completions")).status_code == 200
        assert [sent.get("model", MODEL) for sent in fake.bodies] == [MODEL]


async def test_one_that_is_loaded_appears_and_one_that_is_unloaded_is_404(
    redis_url: str, tmp_path: Path
) -> None:
    """At once: nobody waits for an adapter that its instance has no more."""
    fake = FakePrefillDecode()
    async with opened_system(redis_url, tmp_path, fake, instance_grace_s=60.0) as system:
        assert code_of(await named(system, "french")) == (404, "model_not_found")
        assert fake.registration is not None
        await fake.registration.update(adapters=("french",))
        await until(lambda: "french" in system.gateway.view.models)
        assert (await named(system, "french")).status_code == 200
        await fake.registration.update(adapters=())
        await until(lambda: "french" not in system.gateway.view.models)
        assert code_of(await named(system, "french")) == (404, "model_not_found")
        assert (await named(system, MODEL)).status_code == 200


async def test_while_its_instance_is_away_an_adapter_is_503(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path, instance_grace_s=0.1) as system:
        async with FakePrefillDecode(name="pd-1", adapters=("french",)).running(system.bus):
            await until(lambda: "french" in system.gateway.view.models)
        await until(lambda: "french" not in system.gateway.view.models)
        assert code_of(await named(system, "french")) == (503, "no_instance")


@pytest.mark.parametrize("text", ["<|image_pad|>", "an <|vision_start|>"])
async def test_placeholders_are_refused_in_its_requests_too(
    redis_url: str, tmp_path: Path, text: str
) -> None:
    fake = FakePrefillDecode(adapters=("french",))
    async with opened_system(redis_url, tmp_path, fake) as system:
        answer = await system.post({"model": "french", "messages": [{"role": "user", "content": text}]})
        assert answer.status_code == 400, answer.text
        assert not fake.bodies
