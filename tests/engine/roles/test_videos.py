"""Videos whose positions hold time: tokens and logprobs of one engine, whichever instances serve them.

One system has instances of every role, and a front end's headers name those of each way.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.families.answers import TokenAnswer, answer_to, difference
from tests.support.families.family import MAX_MODEL_LEN, Family
from tests.support.families.folders import family_folder
from tests.support.families.registry import FAMILIES
from tests.support.families.videos import timed_family, video_questions
from tests.support.real.roles import FRONT_END, headers_of_pair
from tests.support.real.system import EXACT, Server, System, running_monolith, running_system

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]  # one start for all ways of a family

FAMILIES_WITH_TIME = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen2_5_omni", "qwen3_omni")
EVERY_DAY, NUM_EVERY_DAY = "qwen2_5_vl", 12
NUM_QUESTIONS = 60
WAYS: dict[str, tuple[str, str]] = {
    "e+pd": ("prefill_decode-0", "prefill_decode-0"),
    "e+p+d": ("prefill-0", "decode-0"),
    "ep+d": ("encode_prefill-0", "decode-0"),
    "epd": ("encode_prefill_decode-0", "encode_prefill_decode-0"),
}
"""By topology: the instance that prefills, and the one that decodes."""


@dataclass(frozen=True)
class Case:
    family: Family
    system: System
    expected: Sequence[TokenAnswer | None]  # None: vLLM refuses it
    bodies: Sequence[dict[str, Any]]


def family_parameters() -> list[Any]:
    """One family every day; `TRIPTYCH_FAMILIES=all`, or `--long`, for all of them."""
    return [
        pytest.param(name, marks=() if name == EVERY_DAY else pytest.mark.long) for name in FAMILIES_WITH_TIME
    ]


@pytest.fixture(scope="module", params=family_parameters())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name: str = request.param
    model, family = family_folder(name), timed_family(FAMILIES[name])
    is_short = name == EVERY_DAY and "long" in request.config.getoption("-m")
    questions = video_questions(family, NUM_EVERY_DAY if is_short else NUM_QUESTIONS)
    bodies = [question.body(model.name) for question in questions]
    options = family.engine_options
    with running_monolith(tmp_path_factory.mktemp("alone"), *options, model=model, is_forked=True) as alone:
        expected = [answer_or_none(alone, body, {}) for body in bodies]
    assert sum(each is None for each in expected) <= len(expected) / 5
    lengths = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={MAX_MODEL_LEN}")
    with running_system(
        f"--encoder-args={shlex.join([*EXACT, *options])}",
        f"--prefill-decode-args={shlex.join([*EXACT, *lengths, *options[-1:]])}",
        "--encoders=1", "--prefills=1", "--decodes=1", "--prefill-decodes=1", "--encode-prefills=1",
        "--encode-prefill-decodes=1",
        model=model,
        is_forked=True,
        **FRONT_END,
    ) as system:  # fmt: skip
        yield Case(family, system, expected, bodies)


def answer_or_none(server: Server, body: dict[str, Any], headers: Mapping[str, str]) -> TokenAnswer | None:
    """vLLM 0.32 divides by zero at some videos of one frame."""
    try:
        return answer_to(server, body, headers=headers)
    except AssertionError:
        return None


def difference_of(expected: TokenAnswer | None, got: TokenAnswer | None) -> str:
    if expected is None or got is None:
        return "" if expected is got else f"expected {expected}, got {got}"
    return difference(expected, got)


@pytest.mark.parametrize("way", WAYS)
def test_videos_are_answered_as_by_one_engine(case: Case, way: str) -> None:
    headers = headers_of_pair(case.system, *WAYS[way])
    wrong = [
        f"{number}: {why}"
        for number, (want, body) in enumerate(zip(case.expected, case.bodies, strict=True))
        if (why := difference_of(want, answer_or_none(case.system, body, headers)))
    ]
    assert not wrong, f"{len(wrong)} of {len(case.bodies)}\n" + "\n".join(wrong)[:4000]
