"""Sounds that are to be written down or translated: forms, for instances that encode sounds themselves."""

import io
import wave
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, entry, refusal_of, write_keys
from tests.support.gateway.system import System, opened_system
from triptych_common.protocol.messages import Modality, Role

PATHS = ("/v1/audio/transcriptions", "/v1/audio/translations")


def wav(num_samples: int = 800) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(2 * num_samples))
    return buffer.getvalue()


SOUND = wav()


def hearing(**fields: Any) -> FakePrefillDecode:
    values: dict[str, Any] = {"role": Role.ENCODE_PREFILL_DECODE, "item_limits": {Modality.AUDIO: 1}}
    return FakePrefillDecode(**values | fields)


async def send(
    system: System, path: str = PATHS[0], sound: bytes | None = SOUND, headers: Any = None, **fields: str
) -> httpx.Response:
    files = {} if sound is None else {"file": ('../a"b.wav', sound, "audio/wav")}
    return await system.http.post(path, data={"model": MODEL, **fields}, files=files, headers=headers)


@pytest.mark.parametrize("path", PATHS)
async def test_a_sound_goes_as_it_is_to_an_instance_that_hears(
    redis_url: str, tmp_path: Path, path: str
) -> None:
    """And to no other: this one alone has the tower."""
    deaf = FakePrefillDecode(name="pd-1")
    async with opened_system(redis_url, tmp_path, hearing()) as system, deaf.running(system.bus):
        await system.refresh()
        for _ in range(3):
            answer = await send(system, path, language="en", prompt='a "word"', temperature="0")
            assert (answer.status_code, answer.json()["text"]) == (200, "heard")
            assert answer.headers["x-request-id"]
        assert not deaf.forms
        sent = system.prefill_decode.forms
        wanted = {"model": MODEL, "language": "en", "prompt": 'a "word"', "temperature": "0", "file": SOUND}
        assert sent == [wanted] * 3


async def test_by_the_openai_client_whole_and_streamed(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path, hearing()) as system:
        made = await system.openai.audio.transcriptions.create(model=MODEL, file=("a.wav", SOUND))
        assert made.text == "heard"
        answer = await send(system, stream="true")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert '"heard"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "fake",
    [
        FakePrefillDecode(),
        FakePrefillDecode(item_limits={Modality.AUDIO: 1}),
        hearing(item_limits={Modality.IMAGE: 4}),
    ],
    ids=["no tower", "an encoder's limits", "a tower for images"],
)
async def test_where_no_instance_hears_it_is_not_served(
    redis_url: str, tmp_path: Path, fake: FakePrefillDecode
) -> None:
    async with opened_system(redis_url, tmp_path, fake) as system:
        for path in PATHS:
            assert refusal_of(await send(system, path)) == (404, "endpoint_not_served", "model")
        assert not fake.forms


REFUSED: dict[str, tuple[dict[str, Any], tuple[int, str, str | None]]] = {
    "unknown model": ({"model": "other"}, (404, "model_not_found", "model")),
    "no file": ({"sound": None}, (400, "invalid_multipart", None)),
    "no sound": ({"sound": b"GIF89a" + bytes(100)}, (400, "invalid_audio", "file")),
    "empty": ({"sound": b""}, (400, "invalid_audio", "file")),
    "more than one answer": ({"n": "4"}, (400, "field_not_allowed", "n")),
    "arguments of vLLM's": ({"vllm_xargs": "{}"}, (400, "field_not_allowed", "vllm_xargs")),
    "transfer parameters": ({"ec_transfer_params": "{}"}, (400, "field_not_allowed", "ec_transfer_params")),
    "stream": ({"stream": "perhaps"}, (400, "invalid_value", "stream")),
    "a placeholder": ({"prompt": "<|image_pad|>"}, (400, "placeholder_in_text", "prompt")),
    "too large": ({"sound": wav(20_000)}, (413, "body_too_large", None)),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_wrong_is_refused_and_named(redis_url: str, tmp_path: Path, name: str) -> None:
    fields, wanted = REFUSED[name]
    async with opened_system(redis_url, tmp_path, hearing(), max_body_bytes=20_000) as system:
        assert refusal_of(await send(system, **fields)) == wanted
        assert not system.prefill_decode.forms


async def test_a_body_that_is_no_form_is_refused(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path, hearing()) as system:
        answer = await system.http.post(PATHS[0], json={"model": MODEL})
        assert refusal_of(answer)[:2] == (400, "invalid_multipart")


async def test_a_request_without_a_model_means_the_only_one(redis_url: str, tmp_path: Path) -> None:
    async with opened_system(redis_url, tmp_path, hearing()) as system:
        answer = await system.http.post(PATHS[0], files={"file": ("a.wav", SOUND)})
        assert answer.status_code == 200, answer.text
        assert system.prefill_decode.forms == [{"file": SOUND}]


async def test_a_tenants_caller_is_not_served(redis_url: str, tmp_path: Path, keys_file: Path) -> None:
    """No field would keep what its requests leave in a cache apart."""
    async with opened_system(redis_url, tmp_path, hearing(), api_keys_file=keys_file) as system:
        answers = [
            await send(system, headers={"Authorization": f"Bearer {key}"})
            for key in ("key-alice", "key-carol")
        ]
        assert refusal_of(answers[0]) == (404, "endpoint_not_served", "model")
        assert answers[1].status_code == 200
        assert refusal_of(await send(system)) == (401, "missing_api_key", None)
        assert len(system.prefill_decode.forms) == 1


async def test_a_key_with_a_limit_of_tokens_names_the_longest_answer(redis_url: str, tmp_path: Path) -> None:
    """It is what the request is charged: no answer tells what it has taken."""
    keys = write_keys(
        tmp_path / "keys.toml",
        entry("alice", "one", tokens_per_minute=1000),
        entry("bob", "two", requests_per_minute=10),
    )
    async with opened_system(redis_url, tmp_path, hearing(), api_keys_file=keys) as system:
        headers = {"Authorization": "Bearer one"}
        for path in PATHS:
            for fields in ({}, {"max_completion_tokens": "0"}, {"max_completion_tokens": "many"}):
                answer = await send(system, path, headers=headers, **fields)
                assert refusal_of(answer) == (400, "missing_field", "max_completion_tokens")
        assert not system.prefill_decode.forms
        answer = await send(system, headers=headers, max_completion_tokens="900")
        assert answer.status_code == 200
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= 100
        answer = await send(system, headers=headers, max_completion_tokens="900")
        assert refusal_of(answer)[:2] == (429, "rate_limit_exceeded")
        assert (await send(system, headers={"Authorization": "Bearer two"})).status_code == 200
