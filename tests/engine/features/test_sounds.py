"""Sounds written down and translated by an instance that encodes them itself, as vLLM alone does it."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.families.family import MediaKind
from tests.support.families.folders import family_folder
from tests.support.families.media import SHAPES, Sample
from tests.support.real.system import EXACT, Server, System, running_monolith, running_system
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

ONE_SOUND = '--limit-mm-per-prompt={"image": 0, "video": 0, "audio": 1}'
TRANSCRIPTIONS, TRANSLATIONS = "/audio/transcriptions", "/audio/translations"


@pytest.fixture(scope="module")
def model() -> Path:
    return family_folder("qwen3_omni")


@pytest.fixture(scope="module")
def hearing(model: Path) -> Iterator[System]:
    with running_system(
        "--encoders=0",
        "--local-encode=fallback",
        f"--prefill-decode-args={shlex.join([*EXACT, ONE_SOUND])}",
        model=model,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def hearing_monolith(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_monolith(tmp_path_factory.mktemp("hearing"), ONE_SOUND, model=model) as running:
        yield running


def ask(server: Server, path: str, sound: Sample, **fields: str) -> Any:
    answer = httpx.post(
        server.base_url + path,
        data={"temperature": "0", "max_completion_tokens": "12", **fields},
        files={"file": ("sound.wav", sound.data, "audio/wav")},
        timeout=120,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("path", [TRANSCRIPTIONS, TRANSLATIONS])
def test_a_sounds_text_is_the_monoliths(hearing: System, hearing_monolith: Server, path: str) -> None:
    sounds = [Sample(MediaKind.AUDIO, shape, seed) for seed, shape in enumerate(SHAPES[MediaKind.AUDIO])]
    texts = set()
    for sound in sounds:
        got, wanted = (
            ask(server, path, sound, language="en").json() for server in (hearing, hearing_monolith)
        )
        assert got == wanted
        texts.add(wanted["text"])
    assert len(texts) > 1, "the sound changes the answer"


def test_streamed_too(hearing: System, hearing_monolith: Server) -> None:
    sound = Sample(MediaKind.AUDIO, SHAPES[MediaKind.AUDIO][1], 7)
    answer = ask(hearing, TRANSCRIPTIONS, sound, stream="true")
    assert answer.text.rstrip().endswith("data: [DONE]")
    whole = ask(hearing_monolith, TRANSCRIPTIONS, sound).json()["text"]
    assert _streamed_text(answer.text).strip() == whole.strip()
    wait_until(lambda: hearing.store_stats().num_pins == 0, 10, "nothing stays pinned")


def _streamed_text(events: str) -> str:
    text = ""
    for event in events.split("\n\n"):
        data = event.removeprefix("data: ")
        if data.startswith("{"):
            text += "".join(each["delta"].get("content") or "" for each in json.loads(data)["choices"])
    return text
