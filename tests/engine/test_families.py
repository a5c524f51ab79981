"""Every family of models through the whole system: what the monolith answers, token for token.

A third of them, another one each day; `TRIPTYCH_FAMILIES=all`, or names with commas between them, for others.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.families.answers import answers_to, difference
from tests.support.families.family import MAX_MODEL_LEN
from tests.support.families.folders import family_folder
from tests.support.families.questions import family_questions
from tests.support.families.registry import FAMILIES
from tests.support.real.system import EXACT, Server, System, running_monolith, running_system

pytestmark = pytest.mark.engine

NUM_PARTS = 3
NUM_CLIENTS = 4


def chosen_families() -> list[str]:
    asked = os.environ.get("TRIPTYCH_FAMILIES")
    if asked is not None:
        return list(FAMILIES) if asked == "all" else asked.split(",")
    return list(FAMILIES)[datetime.now(UTC).toordinal() % NUM_PARTS :: NUM_PARTS]


@contextlib.contextmanager
def both_running(name: str, log_folder: Path) -> Iterator[tuple[System, Server]]:
    """Started at the same time."""
    family, model = FAMILIES[name], family_folder(name)
    lengths = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={MAX_MODEL_LEN}")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        monolith = pool.submit(
            stack.enter_context, running_monolith(log_folder, *family.engine_options, model=model)
        )
        system = stack.enter_context(
            running_system(
                f"--model={model}",
                f"--encoder-args={shlex.join([*EXACT, *family.engine_options])}",
                f"--prefill-decode-args={shlex.join([*EXACT, *lengths])}",
                TRIPTYCH_OVERLAP_MIN_TOKENS="1",
            )
        )
        yield system, monolith.result()


@pytest.mark.parametrize("name", chosen_families())
def test_answers_equal_the_monoliths(name: str, tmp_path: Path) -> None:
    questions = family_questions(FAMILIES[name])
    bodies = [question.body(family_folder(name).name) for question in questions]
    with both_running(name, tmp_path) as (system, monolith):
        expected = answers_to(monolith, bodies)
        got = answers_to(system, bodies, NUM_CLIENTS)
        again = answers_to(system, bodies, NUM_CLIENTS)  # everything is known by now
        towers = towers_not_loaded(system)
    wrong = [
        f"{time}: {number}: {why}"
        for time, answers in (("first", got), ("again", again))
        for number, (want, answer) in enumerate(zip(expected, answers, strict=True))
        if (why := difference(want, answer))
    ]
    assert not wrong, "\n".join(wrong)
    assert towers, "prefill_decode has loaded a tower"


def towers_not_loaded(system: System) -> list[str]:
    """Parts of the model that prefill_decode does without, by its log."""
    lines = (system.logs_dir / "prefill_decode-0.log").read_text().splitlines()
    (line,) = [line for line in lines if '"prefill_decode ready"' in line]
    towers: list[str] = json.loads(line)["layers_not_loaded"]
    return towers
