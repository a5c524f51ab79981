"""Requests whose videos and sounds are named by URL, through a real gateway."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway.media_server import (
    SERVED,
    MediaServer,
    answering,
)
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.system import System, opened_system
from triptych_common.protocol.messages import Modality

MP4 = b"\x00\x00\x00\x18ftypisom\x00\x00\x02\x00isomiso2" + bytes(100)
AVI = b"RIFF\x24\x00\x00\x00AVI LIST" + bytes(100)
WAV = b"RIFF\x24\x00\x00\x00WAVEfmt " + bytes(90)
PNG = image_bytes(7)
MAX_ITEM_BYTES = 10_000


@pytest.fixture
async def system(redis_url: str, tmp_path: Path, server: MediaServer) -> AsyncIterator[System]:
    """May fetch from `server`, which has media of all kinds; the model takes them."""
    for path, content in (("/a.mp4", MP4), ("/a.wav", WAV)):
        server.answers[path] = answering(body=content, headers={"Content-Type": "text/plain"})
    async with opened_system(
        redis_url,
        tmp_path,
        encoder_limits=dict.fromkeys(Modality, 4),
        fetch_allowed_networks=(f"{SERVED}/32",),
        fetch_allowed_ports=(server.port,),
        max_item_bytes=MAX_ITEM_BYTES,
        fetch_max_attempts=2,
    ) as opened:
        yield opened


def part(kind: str, url: str) -> dict[str, Any]:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def chat(*content: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(content)}]}


def sent(system: System, at: int = -1) -> list[dict[str, Any]]:
    """The parts that prefill_decode got."""
    content: list[dict[str, Any]] = system.prefill_decode.bodies[at]["messages"][0]["content"]
    return content


@pytest.mark.parametrize(("kind", "path", "content"), [("video", "/a.mp4", MP4), ("audio", "/a.wav", WAV)])
async def test_what_a_url_leads_to_is_what_a_data_url_holds(
    system: System, server: MediaServer, kind: str, path: str, content: bytes
) -> None:
    """One item, one job, the server's bytes; over redirects, too."""
    inline = part(kind, data_url(content, f"{kind}/x"))
    for each in (part(kind, server.url(path)), part(kind, server.leading_to(server.url(path))), inline):
        answer = await system.ask([each])
        assert answer.choices[0].message.content.startswith(f"1x1x{len(content)} ")
    sample = system.gateway.services.metrics.metrics.registry.get_sample_value
    for name, times in {"fetch_seconds": 2, "item_check_seconds": 3, "item_bytes": 3}.items():
        assert sample(f"triptych_gateway_{name}_count", {"modality": kind}) == times, name
    (job,) = system.encoder.jobs
    assert (job.modality, system.encoder.media) == (Modality(kind), [content])
    assert [sent(system, at) for at in range(3)] == [
        [{"type": f"{kind}_embeds", f"{kind}_embeds": None, "uuid": job.mm_hash}]
    ] * 3


WRONG: dict[str, tuple[str, bytes]] = {
    "a page as a video": ("video", b"<html>"),
    "nothing as a video": ("video", b""),
    "an image as a video": ("video", PNG),
    "a sound as a video": ("video", WAV),
    "a play list as a video": ("video", b"#EXTM3U\nhttp://127.0.0.1/\n"),
    "a page as a sound": ("audio", b"<html>"),
    "nothing as a sound": ("audio", b""),
    "an AVI as a sound": ("audio", AVI),
    "a play list as a sound": ("audio", b"#EXTM3U\nhttp://127.0.0.1/\n"),
    "a session description as a sound": ("audio", b"v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\n"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_bytes(system: System, server: MediaServer, name: str) -> None:
    """Whatever its server calls them."""
    kind, content = WRONG[name]
    media_type = {"video": "video/mp4", "audio": "audio/wav"}[kind]
    server.answers["/wrong"] = answering(body=content, headers={"Content-Type": media_type})
    good = part("image", server.url("/a.png"))
    answer = await system.post(chat(good, part(kind, server.url("/wrong?signature=secret"))))
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, f"invalid_{kind}"), answer.text
    assert error["param"] == f"messages[0].content[1].{kind}_url.url"
    assert "secret" not in answer.text
    assert system.encoder.jobs == []
