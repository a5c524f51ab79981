"""By instances that encode themselves: families that no encoder takes, and media of all kinds in chats."""

import base64
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.families.answers import answers_to, difference, monolith_answers
from tests.support.families.family import MAX_MODEL_LEN, MediaKind
from tests.support.families.folders import family_folder
from tests.support.families.media import SHAPES, AudioShape, Sample, VideoShape
from tests.support.families.questions import family_questions
from tests.support.families.registry import ALL_FAMILIES
from tests.support.real.inspection import redis_url
from tests.support.real.system import (
    EXACT,
    START_TIMEOUT_S,
    Server,
    System,
    running_monolith,
    running_system,
)
from tests.support.real.warm.preload import ENVIRONMENT

pytestmark = [pytest.mark.engine, pytest.mark.long]

LENGTHS = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={MAX_MODEL_LEN}")
TOPOLOGIES = {"epd": ("--encode-prefill-decodes=1",), "ep+d": ("--encode-prefills=1", "--decodes=1")}
NUM_CLIENTS = 4
A_SOUND = (MediaKind.AUDIO, SHAPES[MediaKind.AUDIO][0], 1)


def status_of(system: System, model: str, part: dict[str, Any]) -> int:
    """Of the answer to a chat with one media part, which no instance should serve."""
    body = {"model": model, "messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
    url = f"{system.base_url}/chat/completions"
    return httpx.post(url, json=body, timeout=60, trust_env=False).status_code


def video_part(data: bytes) -> dict[str, Any]:
    url = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
    return {"type": "video_url", "video_url": {"url": url}}


BAD_MEDIA = {
    "a damaged video": video_part(b"\0\0\0\x20ftypisom" + bytes(200)),
    "a video that is too long": Sample(MediaKind.VIDEO, VideoShape(64, 64, 30, 1), 1).part(),
    "no sound": {"type": "input_audio", "input_audio": {"data": "UklGRiQAAABXQVZFZm10IA==", "format": "wav"}},
}


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """What monoliths have answered, by family."""
    return {}


@pytest.mark.parametrize(
    ("name", "topology"),
    [("blip2", "epd"), ("qwen2_5_omni", "epd"), ("blip2", "ep+d"), ("qwen2_5_omni", "ep+d")],
)
def test_chats(name: str, topology: str, known: dict[str, Any], tmp_path: Path) -> None:
    """BLIP-2's image has no token in the text. Omni's requests hold images, videos and sounds together."""
    model = family_folder(name)
    bodies = [each.body(model.name) for each in family_questions(ALL_FAMILIES[name])]
    if name not in known:
        known[name] = monolith_answers(name, bodies, tmp_path)
    args = shlex.join([*EXACT, *LENGTHS])
    options = (*TOPOLOGIES[topology], f"--prefill-decode-args={args}")
    with running_system(*options, model=model, is_forked=True, TRIPTYCH_MAX_VIDEO_S="20") as system:
        assert "encode" not in {each["role"] for each in system.instances().values()}
        refused = {why: status_of(system, model.name, part) for why, part in BAD_MEDIA.items()}
        got = answers_to(system, bodies, NUM_CLIENTS)
    assert set(refused.values()) == {httpx.codes.BAD_REQUEST}, refused
    wrong = [
        f"{number}: {why}"
        for number, (want, answer) in enumerate(zip(known[name], got, strict=True))
        if (why := difference(want, answer))
    ]
    assert not wrong, "\n".join(wrong)


# ---- encoder-decoder models --------------------------------------------------------------------------
NUM_EQUAL = 4  # sounds that are asked for at once: their encodings are shared by nobody
LONG = AudioShape(40.0, 16_000)  # vLLM cuts it into chunks


def write_down(server: Server, path: str, sound: Sample) -> Any:
    answer = httpx.post(
        server.base_url + path,
        data={"temperature": "0", "max_completion_tokens": "12", "language": "en"},
        files={"file": ("sound.wav", sound.data, "audio/wav")},
        timeout=120,
        trust_env=False,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def whisper() -> Iterator[System]:
    with running_system(
        *TOPOLOGIES["epd"],
        f"--prefill-decode-args={shlex.join(EXACT)}",
        model=family_folder("whisper"),
        is_forked=True,
    ) as system:
        yield system


def test_a_whisper_model_writes_down_and_translates(whisper: System, tmp_path: Path) -> None:
    shapes = [*SHAPES[MediaKind.AUDIO], LONG]
    sounds = [Sample(MediaKind.AUDIO, shape, seed) for seed, shape in enumerate(shapes)]
    asked = [(path, sound) for path in ("/audio/transcriptions", "/audio/translations") for sound in sounds]
    with running_monolith(tmp_path, model=family_folder("whisper"), is_forked=True) as monolith:
        wanted = [write_down(monolith, *each) for each in asked]
    with ThreadPoolExecutor(NUM_EQUAL) as pool:
        got = list(pool.map(lambda each: write_down(whisper, *each), asked * NUM_EQUAL))
    assert got == wanted * NUM_EQUAL
    assert len({each["text"] for each in wanted}) > len(shapes), "sounds and tasks change the answer"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/chat/completions", {"messages": [{"role": "user", "content": [Sample(*A_SOUND).part()]}]}),
        ("/completions", {"prompt": "hello"}),
    ],
    ids=["chat", "chat with a sound", "completion"],
)
def test_what_a_whisper_model_does_not_serve(whisper: System, path: str, body: dict[str, Any]) -> None:
    model = family_folder("whisper").name
    answer = httpx.post(whisper.base_url + path, json={"model": model, **body}, timeout=60, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "endpoint_not_served"), answer.text


@pytest.mark.parametrize(
    ("service", "name", "why"),
    [
        ("triptych_encoder", "whisper", "is an encoder-decoder model, whose stages cannot be apart"),
        ("triptych_prefill_decode", "whisper", "is an encoder-decoder model, whose stages cannot be apart"),
        ("triptych_encoder", "blip2", "a placeholder that is found by its place, not by its tokens"),
    ],
)
def test_an_instance_of_some_stages_alone_refuses_to_start(
    whisper: System, service: str, name: str, why: str
) -> None:
    """`whisper` lends its Redis and its store."""
    started = subprocess.run(
        [sys.executable, "-m", service, "--instance=refused-0", f"--model={family_folder(name)}"],
        env={**whisper.env, **ENVIRONMENT, "TRIPTYCH_REDIS_URL": redis_url(whisper)},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert started.returncode != 0
    assert why in started.stdout + started.stderr
