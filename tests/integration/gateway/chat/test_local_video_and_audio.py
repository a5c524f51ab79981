"""Videos and sounds in chats, where an instance encodes them itself."""

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.local_encode import QUICK, tower, without_encoders
from tests.support.gateway.samples import data_url, image_bytes
from tests.support.gateway.system import System, opened_system
from triptych_common.protocol.messages import Modality, Role

MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + bytes(100)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(90)
PNG = image_bytes(7)
TEXT = {"type": "text", "text": "what is this?"}
IMAGE = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
VIDEO = {"type": "video_url", "video_url": {"url": data_url(MP4, "video/mp4")}}
SOUND = {"type": "input_audio", "input_audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}
ALL = dict.fromkeys(Modality, 4)


@pytest.fixture
async def system(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[System]:
    """The encoder takes media of all kinds."""
    settings = QUICK | getattr(request, "param", {})
    async with opened_system(redis_url, tmp_path, encoder_limits=ALL, **settings) as opened:
        yield opened


def sent_media(instance: FakePrefillDecode) -> list[tuple[str, bytes]]:
    """Raw media of the last request, in order."""
    parts: list[dict[str, Any]] = instance.bodies[-1]["messages"][0]["content"]
    media = [(part["type"], part[part["type"]]["url"]) for part in parts if part["type"] != "text"]
    return [(kind, base64.b64decode(url.partition("base64,")[2])) for kind, url in media]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_encoders_all_kinds_go_whole_and_in_order(system: System, stream: bool) -> None:
    instance = await tower(system, item_limits=ALL)
    await without_encoders(system)
    answer = await system.ask([VIDEO, TEXT, SOUND, IMAGE], stream=stream)
    if stream:
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
    else:
        text = answer.choices[0].message.content
    assert text.startswith(f"1x1x{len(MP4)} 1x1x{len(WAV)} 1x8x8 ")
    assert sent_media(instance) == [("video_url", MP4), ("audio_url", WAV), ("image_url", PNG)]
    assert system.prefill_decode.bodies == []


@pytest.mark.parametrize("part", [VIDEO, SOUND], ids=["video", "sound"])
async def test_a_tower_that_does_not_say_so_gets_images_alone(system: System, part: dict[str, Any]) -> None:
    instance = await tower(system)
    await without_encoders(system)
    with pytest.raises(openai.InternalServerError) as caught:
        await system.ask([TEXT, part])
    assert (caught.value.status_code, caught.value.code) == (503, "no_encoder")
    assert instance.bodies == []
    await system.ask([TEXT, IMAGE])
    assert sent_media(instance) == [("image_url", PNG)]


async def test_the_instance_that_takes_them_is_chosen(system: System) -> None:
    for name in ("a-silent", "c-silent"):
        await tower(system, name)
    hearing = await tower(system, "b-hearing", item_limits=ALL)
    await without_encoders(system)
    for _ in range(4):
        await system.ask([TEXT, SOUND])
    assert len(hearing.bodies) == 4


@pytest.mark.parametrize(
    ("system", "is_local", "reason"),
    [
        ({"encode_decision": "auto"}, False, "for_encoders"),
        ({"encode_decision": "remote"}, False, "forced"),
        ({"encode_decision": "local"}, True, "forced"),
    ],
    indirect=["system"],
)
async def test_while_encoders_are_there_they_get_them(system: System, is_local: bool, reason: str) -> None:
    """Unless the operator has decided otherwise: what they cost cannot be foreseen."""
    instance = await tower(system, item_limits=ALL)
    await system.ask([TEXT, VIDEO, SOUND])
    labels = {"way": "local" if is_local else "remote", "reason": reason}
    registry = system.gateway.services.metrics.metrics.registry
    assert registry.get_sample_value("triptych_gateway_encode_decisions_total", labels) == 1
    assert len(system.encoder.jobs) == (0 if is_local else 2)
    if is_local:
        assert sent_media(instance) == [("video_url", MP4), ("audio_url", WAV)]


async def test_a_namespace_that_never_had_an_encoder(redis_url: str, tmp_path: Path) -> None:
    """As `./triptych up --encode-prefill-decodes 1` starts it: what its instances announce is the limit."""
    alone = FakePrefillDecode(
        role=Role.ENCODE_PREFILL_DECODE, digest="e" * 64, item_limits={Modality.VIDEO: 1}
    )
    async with opened_system(redis_url, tmp_path, alone, **QUICK) as system:
        await system.ask([TEXT, VIDEO])
        assert sent_media(alone) == [("video_url", MP4)]
        for content, code, place in (
            ([TEXT, VIDEO, VIDEO], "too_many_items", "content[2].video_url.url"),
            ([SOUND], "unsupported_media", "content[0].input_audio.data"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await system.ask(content)
            assert (caught.value.code, caught.value.param) == (code, f"messages[0].{place}")
        assert len(alone.bodies) == 1
