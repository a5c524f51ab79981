"""Videos in pieces through the whole system: what one engine answers to the whole video, token for token.

And their prefill begins with the first piece, while the last one is still to be encoded. One family, another
each day; `TRIPTYCH_VIDEO_FAMILIES=all`, or names with commas between them, for others.
"""

import os
import shlex
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support.families.answers import TokenAnswer, answer_to, answers_to, difference, monolith_answers
from tests.support.families.family import MAX_MODEL_LEN, MediaKind
from tests.support.families.folders import family_folder
from tests.support.families.media import ImageShape, Sample, VideoShape
from tests.support.families.questions import FamilyQuestion
from tests.support.families.registry import FAMILIES
from tests.support.real.system import EXACT, SPANS_TIMEOUT_S, System, running_system
from tests.support.waiting import wait_until
from triptych_common.telemetry.span_records import SpanRecord

pytestmark = pytest.mark.engine

DIVIDED = ("qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen2_5_omni", "qwen3_omni")
WHOLE = ("llava_onevision",)
LENGTHS = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={MAX_MODEL_LEN}")
ENCODE_DELAY_MS = 300
NUM_PIECES = 4  # of a video of 8 frames, two by two
SLOW, FAST = (VideoShape(112, 84, 8, frames_per_s=1), VideoShape(84, 112, 8, frames_per_s=2))
NUM_CLIENTS = 3
RESTART_TIMEOUT_S = 300  # an encoder that is killed starts again meanwhile
SPANS_OF_PIECES = ("prefill.inject", "prefill.wait")


def chosen_families() -> list[str]:
    asked = os.environ.get("TRIPTYCH_VIDEO_FAMILIES")
    families = [*DIVIDED, *WHOLE]
    if asked is not None:
        return families if asked == "all" else asked.split(",")
    return [families[datetime.now(UTC).toordinal() % len(families)]]


def questions(name: str) -> list[FamilyQuestion]:
    """Videos alone, behind and before text, beside images, twice in a prompt, and one behind the other."""
    first, second, third = (Sample(MediaKind.VIDEO, SLOW, seed) for seed in range(3))
    fast = Sample(MediaKind.VIDEO, FAST, 3)
    image = Sample(MediaKind.IMAGE, ImageShape(120, 84), 4)
    asked = [
        FamilyQuestion(("What is in this video?", first, "Why?")),
        FamilyQuestion((fast,)),
        FamilyQuestion((image, "read the digits", second), system="count to 20"),
        FamilyQuestion((third, "and now, please:"), history=((image, "Why?"), "read the digits")),
    ]
    if FAMILIES[name].limits[MediaKind.VIDEO] > 1:
        asked += [
            FamilyQuestion((first, first, "Compare it to the first.")),
            FamilyQuestion((second, "Is there more of it?", fast)),
        ]
    return asked


@contextmanager
def system_of(name: str, **env: str) -> Iterator[System]:
    with running_system(
        f"--encoder-args={shlex.join([*EXACT, *FAMILIES[name].engine_options])}",
        f"--prefill-decode-args={shlex.join([*EXACT, *LENGTHS])}",
        model=family_folder(name),
        TRIPTYCH_OVERLAP_MIN_TOKENS="1",
        TRIPTYCH_FIRST_TOKEN_TIMEOUT_S=str(RESTART_TIMEOUT_S),
        TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(ENCODE_DELAY_MS),
        is_forked=True,
        **env,
    ) as system:
        yield system


@pytest.mark.parametrize("name", chosen_families())
def test_a_video_in_pieces_is_answered_as_one_engine_answers_it(name: str, tmp_path: Path) -> None:
    asked = questions(name)
    bodies = [question.body(family_folder(name).name) for question in asked]
    with system_of(name, TRIPTYCH_VIDEO_PIECE_ROWS="1") as system:
        checked = line_of(system, "encoder-0", "video steps checked")
        answer_to(system, video_body(name, seed=70))  # an engine's first steps are slow
        spans = spans_of(system, video_body(name, seed=71), NUM_PIECES if name in DIVIDED else 1)
        got = answers_to(system, bodies, NUM_CLIENTS)
        again = answers_to(system, bodies, NUM_CLIENTS)  # everything is known by now
        if name in DIVIDED:
            bodies.append(video_body(name, seed=72))
            got.append(answer_over_a_killed_encoder(system, bodies[-1]))
            again.append(answer_to(system, bodies[-1]))
        wait_until(lambda: system.store_stats().num_pins == 0, 10, "all pins end")
        logs = (system.logs_dir / "prefill_decode-0.log").read_text()
    expected = monolith_answers(name, bodies, tmp_path)
    wrong = [
        f"{time}: {number}: {why}"
        for time, answers in (("first", got), ("again", again))
        for number, (want, answer) in enumerate(zip(expected, answers, strict=True))
        if (why := difference(want, answer))
    ]
    assert not wrong, "\n".join(wrong)
    assert checked["are_apart"] == (name in DIVIDED), checked
    encodes = [span for span in spans if span.name == "encoder.encode"]
    assert len(encodes) == (NUM_PIECES if name in DIVIDED else 1), encodes
    if name in DIVIDED:
        check_overlap(spans)
    assert "admission failed" not in logs


def check_overlap(spans: list[SpanRecord]) -> None:
    """prefill_decode had computed rows of the first piece while it waited for the last."""
    encodes, injects, waits = (named(spans, name) for name in ("encoder.encode", *SPANS_OF_PIECES))
    assert injects[0].start_ns < encodes[-1].start_ns, "it began before the last encode"
    missing = [int(span.attributes["triptych.num_items_missing"]) for span in waits]
    computed = [int(span.attributes["triptych.num_computed_tokens"]) for span in waits]
    assert set(range(1, len(encodes))) <= set(missing), "it waited for each piece in turn"
    assert computed == sorted(computed)
    assert len(set(computed)) >= len(encodes), "and computed those before it meanwhile"


def named(spans: list[SpanRecord], name: str) -> list[SpanRecord]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_ns)


def answer_over_a_killed_encoder(system: System, body: dict[str, Any]) -> TokenAnswer:
    """Its encoder dies between the first piece and the last: another one makes the rest."""
    num_sealed = system.store_stats().num_seals_total
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(answer_to, system, body, RESTART_TIMEOUT_S)
        wait_until(lambda: system.store_stats().num_seals_total > num_sealed, 20, "the first piece is sealed")
        os.kill(system.service_pid("encoder-0"), signal.SIGKILL)
        return answer.result()


def video_body(name: str, seed: int) -> dict[str, Any]:
    question = FamilyQuestion((Sample(MediaKind.VIDEO, SLOW, seed), "Why?"))
    return question.body(family_folder(name).name)


def spans_of(system: System, body: dict[str, Any], num_pieces: int) -> list[SpanRecord]:
    """Of a request for one video; all of them that are about its pieces."""
    reply = httpx.post(
        f"{system.base_url}/chat/completions",
        json=body, timeout=120, trust_env=False, headers={"Authorization": "Bearer none"},
    )  # fmt: skip
    assert reply.status_code == httpx.codes.OK, reply.text[:2000]
    found: list[SpanRecord] = []

    def is_complete() -> bool:  # processes write their spans at times of their own
        found[:] = system.trace(reply.headers["x-request-id"], "encoder.encode", *SPANS_OF_PIECES)
        return all(len(named(found, name)) >= num_pieces for name in ("encoder.encode", *SPANS_OF_PIECES))

    wait_until(is_complete, SPANS_TIMEOUT_S, "the spans of all pieces")
    return found


def line_of(system: System, service: str, message: str) -> dict[str, Any]:
    lines = (system.logs_dir / f"{service}.log").read_text().splitlines()
    (line,) = [line for line in lines if f'"{message}"' in line]
    found: dict[str, Any] = orjson.loads(line)
    return found
