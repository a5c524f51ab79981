"""A model as it is published: bfloat16, its processor's own settings, media of usual sizes.

Tokens and logprobs are those of one vLLM engine. The engines take the dtype from the model.
"""

import json
import shlex
from pathlib import Path

import pytest

from tests.support.families.answers import BFLOAT16_TOLERANCE, answer_to, answers_to, difference
from tests.support.families.family import MediaKind
from tests.support.families.folders import family_folder
from tests.support.families.media import ImageShape, Sample, Shape, VideoShape
from tests.support.families.questions import FamilyQuestion, Part
from tests.support.real.roles import FRONT_END, headers_of_pair
from tests.support.real.system import running_monolith, running_system

pytestmark = pytest.mark.engine

NAME = "qwen2_5_vl_7b"
PAIRS = (("prefill_decode-0", "prefill_decode-0"), ("prefill-0", "decode-0"))
NUM_TOKENS = 12
LENGTHS = ("--dtype=auto", "--max-model-len=8192", "--max-num-batched-tokens=8192")
# A start tries the tower on the largest items, of 16,384 tokens each: minutes on two cores.
DUMMIES = {
    "image": {"count": 4, "width": 448, "height": 448},
    "video": {"count": 2, "width": 224, "height": 224, "num_frames": 8},
}
MEDIA = f"--limit-mm-per-prompt={json.dumps(DUMMIES)}"


def sample(shape: Shape, seed: int) -> Sample:
    kind = MediaKind.IMAGE if isinstance(shape, ImageShape) else MediaKind.VIDEO
    return Sample(kind, shape, seed)


PHOTO, SCREEN = sample(ImageShape(1280, 853), 1), sample(ImageShape(640, 1136), 2)
ICON, STRIP = sample(ImageShape(16, 16), 3), sample(ImageShape(1500, 40), 4)
CLIP, SLOW = sample(VideoShape(320, 240, 24, 8), 5), sample(VideoShape(160, 284, 7, 1), 6)
FAST = sample(VideoShape(204, 116, 50, 30), 7)
QUESTIONS: dict[str, tuple[Part, ...]] = {
    "image": (PHOTO, "What is in this image?"),
    "images": ("Compare", PHOTO, SCREEN, ICON, STRIP),
    "video": ("What happens?", CLIP),
    "two videos": (CLIP, "and then", SLOW, "Which is longer?"),
    "mixture": (ICON, FAST, "Is it in", PHOTO, "?", SLOW),
}


def test_answers_equal_those_of_one_engine(tmp_path: Path) -> None:
    model = family_folder(NAME)
    bodies = [FamilyQuestion(parts).body(model.name, NUM_TOKENS) for parts in QUESTIONS.values()]
    with running_monolith(tmp_path, *LENGTHS, MEDIA, model=model, is_forked=True) as alone:
        expected = answers_to(alone, bodies)
    with running_system(
        f"--encoder-args={shlex.join([*LENGTHS, MEDIA])}",
        f"--prefill-decode-args={shlex.join(LENGTHS)}",
        "--encoders=1", "--prefill-decodes=1", "--prefills=1", "--decodes=1",
        model=model,
        is_forked=True,
        **FRONT_END,
    ) as system:  # fmt: skip
        got = {
            pair: [answer_to(system, body, headers=headers_of_pair(system, *pair)) for body in bodies]
            for pair in PAIRS
        }
        assert "bfloat16" in system.command("store", "ls").stdout
    wrong = [
        f"{pair}: {name}: {why}"
        for pair, answers in got.items()
        for name, want, answer in zip(QUESTIONS, expected, answers, strict=True)
        if (why := difference(want, answer, BFLOAT16_TOLERANCE))
    ]
    assert not wrong, "\n".join(wrong)
