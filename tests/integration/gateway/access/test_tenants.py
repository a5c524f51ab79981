"""Tenants: what one caller's requests leave behind is nothing that another tenant's could find."""

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.local_encode import ANSWER, QUICK, tower, without_encoders
from tests.support.gateway.samples import KEYS, MODEL, data_url, image_bytes
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until
from triptych_common.domain.hashing import tenant_salt
from triptych_common.telemetry.logs import JsonFormatter
from triptych_gateway.access.auth import ApiKeysFileError
from triptych_gateway.gateway import run_gateway
from triptych_gateway.settings import GatewaySettings

MEDIA = image_bytes(7)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(MEDIA)}}
TEXT = {"type": "text", "text": "what is this?"}
OLD_KEY = "key-old"  # of the setting: no name, no tenant


@pytest.fixture
async def tenants(
    redis_url: str, tmp_path: Path, keys_file: Path, request: pytest.FixtureRequest
) -> AsyncIterator[System]:
    changes: dict[str, Any] = getattr(request, "param", {})
    async with opened_system(
        redis_url, tmp_path, api_keys=(OLD_KEY,), api_keys_file=keys_file, **changes
    ) as opened:
        yield opened


async def ask(system: System, key: str, content: Any) -> Any:
    client = system.openai.with_options(api_key=key)
    return await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])


def uuids(prefill_decode: FakePrefillDecode) -> list[str]:
    return [body["messages"][0]["content"][0]["uuid"] for body in prefill_decode.bodies]


async def test_two_tenants_share_no_image(tenants: System) -> None:
    system, encoder = tenants, tenants.encoder
    for key in ("key-alice", "key-bob", "key-anna", "key-alice", "key-bob"):
        await ask(system, key, [IMAGE])
    red, blue, *others = uuids(system.prefill_decode)
    assert red != blue
    assert others == [red, red, blue]  # one tenant's keys share
    assert len(encoder.jobs) == 2
    assert {job.mm_hash for job in encoder.jobs} == {red, blue}
    salts = [body["cache_salt"] for body in system.prefill_decode.bodies]
    assert salts == [tenant_salt(name) for name in ("red", "blue", "red", "red", "blue")]


async def test_those_without_a_tenant_share_with_each_other_alone(tenants: System) -> None:
    system = tenants
    for key in ("key-carol", OLD_KEY, "key-alice"):
        await ask(system, key, [IMAGE])
    carol, old, alice = uuids(system.prefill_decode)
    assert carol == old != alice
    assert len(system.encoder.jobs) == 2
    assert ["cache_salt" in body for body in system.prefill_decode.bodies] == [False, False, True]


async def test_text_carries_the_salt_too(tenants: System) -> None:
    system = tenants
    for key in ("key-alice", "key-bob", "key-carol"):
        await ask(system, key, "hello")
    salts = [body.get("cache_salt") for body in system.prefill_decode.bodies]
    assert salts == [tenant_salt("red"), tenant_salt("blue"), None]


async def test_no_caller_can_take_anothers_salt(tenants: System) -> None:
    extra: dict[str, Any] = {"vllm_xargs": {"cache_salt": tenant_salt("blue")}}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], **extra}
    answer = await tenants.post(body, headers={"Authorization": "Bearer key-alice"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "field_not_allowed")
    assert not tenants.prefill_decode.bodies


async def test_a_callers_own_salt_never_replaces_its_tenants(tenants: System) -> None:
    """A caller's own salt separates prompts, as in vLLM; an image stays one item of its tenant."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}
    for key, own in (
        ("alice", tenant_salt("blue")),
        ("alice", "b"),
        ("bob", "b"),
        ("carol", tenant_salt("red")),
    ):
        answer = await tenants.post(
            body | {"cache_salt": own}, headers={"Authorization": f"Bearer key-{key}"}
        )
        assert answer.status_code == 200, answer.text
    salts = [str(body["cache_salt"]) for body in tenants.prefill_decode.bodies]
    assert len({*salts, tenant_salt("red"), tenant_salt("blue")}) == len(salts) + 2
    assert [salt.partition(".")[0] for salt in salts] == [*map(tenant_salt, ("red", "red", "blue")), ""]
    red, again, blue, none = uuids(tenants.prefill_decode)
    assert red == again
    assert len({red, blue, none}) == 3


async def test_a_tenants_uuid_in_a_part_is_not_passed_on(tenants: System) -> None:
    """A caller that learned an item's identity cannot ask for it: the gateway names every item itself."""
    await ask(tenants, "key-bob", [IMAGE])
    (blue,) = uuids(tenants.prefill_decode)
    await ask(tenants, "key-alice", [{**IMAGE, "uuid": blue}])
    assert uuids(tenants.prefill_decode)[1] != blue


async def test_a_flight_of_another_tenant_is_not_joined(tenants: System) -> None:
    """While one tenant's image is encoded, the other's request neither waits for it nor gains from it."""
    system, encoder = tenants, tenants.encoder
    encoder.before_seal.clear()
    encoder.before_metadata.clear()
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(system, "key-alice", [IMAGE]))
        await until(lambda: len(encoder.jobs) == 1)
        group.create_task(ask(system, "key-anna", [IMAGE]))  # joins
        group.create_task(ask(system, "key-bob", [IMAGE]))  # orders its own
        await until(lambda: len(encoder.jobs) == 2)
        hashes = {job.mm_hash for job in encoder.jobs}
        assert len(hashes) == 2
        assert {str(item.mm_hash) for item in system.gateway.orders.table} == hashes
        encoder.before_metadata.set()
        encoder.before_seal.set()
    assert len(encoder.jobs) == 2


@pytest.mark.parametrize("tenants", [QUICK], indirect=True)
async def test_raw_media_have_a_name_of_the_tenant(tenants: System) -> None:
    """vLLM would name them by content, and its encoder cache would be shared."""
    system = tenants
    instance = await tower(system)
    await without_encoders(system)
    for key in ("key-alice", "key-bob", "key-anna", "key-carol"):
        answer = await ask(system, key, [IMAGE, TEXT])
        assert answer.choices[0].message.content.strip() == ANSWER
    bodies = [body for body in instance.bodies if "ec_transfer_params" not in body]
    parts = [body["messages"][0]["content"][0] for body in bodies]
    alice, bob, anna, carol = [part.get("uuid") for part in parts]
    assert alice == anna != bob
    assert carol is None
    assert len(bob) == 64
    for part in parts:
        assert base64.b64decode(part["image_url"]["url"].partition("base64,")[2]) == MEDIA


async def test_the_root_span_and_the_logs_name_the_caller_but_not_the_key(
    redis_url: str, tmp_path: Path, keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with opened_system(redis_url, tmp_path, api_keys_file=keys_file) as system:
        with pytest.raises(openai.NotFoundError):
            await system.openai.with_options(api_key="key-bob").chat.completions.create(
                model="nobody", messages=[{"role": "user", "content": "x"}]
            )
        with pytest.raises(openai.AuthenticationError):
            await ask(system, "key-nobody", "x")
    formatter = JsonFormatter("gateway", "gateway-0")
    lines = [formatter.format(record) for record in caplog.records if record.message == "request refused"]
    assert len(lines) == 2
    assert '"api_key_name":"bob"' in lines[0]
    assert '"tenant":"blue"' in lines[0]
    assert "api_key_name" not in lines[1]
    assert "key-bob" not in caplog.text
    assert "key-nobody" not in caplog.text


@pytest.mark.parametrize(("mode", "text"), [(0o644, KEYS), (0o600, "keys = []")])
async def test_a_file_that_cannot_be_used_ends_the_start(
    redis_url: str, tmp_path: Path, keys_file: Path, mode: int, text: str
) -> None:
    await asyncio.to_thread(keys_file.write_text, text)
    await asyncio.to_thread(keys_file.chmod, mode)
    settings = GatewaySettings(redis_url=redis_url, run_dir=tmp_path, api_keys_file=keys_file)
    with pytest.raises(ApiKeysFileError):
        async with run_gateway(settings):
            pass
