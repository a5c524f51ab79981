"""Every family of models through the whole system: what one engine answers, token for token.

A third of them, another each day; `TRIPTYCH_FAMILIES=all`, or names with commas between them, for others.
In float32. `TRIPTYCH_FAMILIES_DTYPE=bfloat16` rounds otherwise where a prompt is cut otherwise, so an answer
may differ where two tokens are alike; `test_published_dtypes.py` has the published dtypes.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson
import psutil
import pytest

from tests.support.families.answers import BFLOAT16_TOLERANCE, TOLERANCE, TokenAnswer, answers_to, difference
from tests.support.families.family import MAX_MODEL_LEN
from tests.support.families.folders import family_folder
from tests.support.families.questions import family_questions
from tests.support.families.registry import FAMILIES
from tests.support.real.system import MONOLITH_ENVIRONMENT, START_TIMEOUT_S, System, running_system
from tests.support.real.warm import client as warm
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

NUM_PARTS = 3
NUM_CLIENTS = 4
ENGINES = ("encoder-0", "prefill_decode-0")
LENGTHS = (f"--max-model-len={MAX_MODEL_LEN}", f"--max-num-batched-tokens={MAX_MODEL_LEN}")
TOLERANCES = {"float32": TOLERANCE, "bfloat16": BFLOAT16_TOLERANCE}
DAY = datetime.now(UTC).toordinal()  # once: midnight may come in between
DTYPE = os.environ.get("TRIPTYCH_FAMILIES_DTYPE", "float32")
DTYPE_OPTION = f"--dtype={DTYPE}"


def chosen_families() -> list[str]:
    asked = os.environ.get("TRIPTYCH_FAMILIES")
    if asked is not None:
        return list(FAMILIES) if asked == "all" else asked.split(",")
    return list(FAMILIES)[DAY % NUM_PARTS :: NUM_PARTS]


CHOSEN = chosen_families()


@dataclass(frozen=True)
class Alone:
    """One engine in one process, which answers the questions of all chosen families meanwhile."""

    process: "warm.ForkedProcess | subprocess.Popen[bytes]"
    folder: Path

    def answers(self, name: str) -> list[TokenAnswer]:
        file = self.folder / f"{name}.json"

        def is_there() -> bool:
            if self.process.poll() is not None and not file.exists():
                pytest.fail((self.folder / "log").read_text(errors="replace")[-3000:])
            return file.exists()

        wait_until(is_there, START_TIMEOUT_S, f"the answers of {name}")
        return [
            TokenAnswer(
                tuple(each["prompt_token_ids"]),
                tuple(each["token_ids"]),
                tuple(each["logprobs"]),
                tuple(tuple((token, logprob) for token, logprob in place) for place in each["rivals"]),
            )
            for each in orjson.loads(file.read_bytes())
        ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    folder = tmp_path_factory.mktemp("alone")
    with (folder / "log").open("wb") as log:
        process = warm.start(
            [sys.executable, "-m", "tests.support.families.answer_alone", str(folder), DTYPE, *CHOSEN],
            environment={**MONOLITH_ENVIRONMENT, **os.environ}, output=log,
        )  # fmt: skip
        try:
            yield Alone(process, folder)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("name", CHOSEN)
def test_answers_equal_those_of_one_engine(name: str, alone: Alone, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    model = family_folder(name)
    bodies = [question.body(model.name) for question in family_questions(FAMILIES[name])]
    with running_system(
        f"--encoder-args={shlex.join([DTYPE_OPTION, *FAMILIES[name].engine_options])}",
        f"--prefill-decode-args={shlex.join([DTYPE_OPTION, *LENGTHS])}",
        model=model,
        TRIPTYCH_OVERLAP_MIN_TOKENS="1",
        is_forked=True,
        PROCESSING_CALLS=str(calls),
    ) as system:
        calls.unlink(missing_ok=True)  # at their start engines process items of their own
        got = answers_to(system, bodies, NUM_CLIENTS)
        again = answers_to(system, bodies, NUM_CLIENTS)  # everything is known by now
        towers = layers_not_loaded(system)
        processed = {service: processed_by(system, service, calls) for service in ENGINES}
    expected = alone.answers(name)
    wrong = [
        f"{time}: {number}: {why}"
        for time, answers in (("first", got), ("again", again))
        for number, (want, answer) in enumerate(zip(expected, answers, strict=True))
        if (why := difference(want, answer, TOLERANCES[DTYPE]))
    ]
    assert not wrong, "\n".join(wrong)
    assert FAMILIES[name].towers, "nothing is known of its towers"
    assert set(towers) >= FAMILIES[name].towers, "prefill_decode has loaded a tower"
    assert processed["encoder-0"], "no call of the model's processor was noted"
    assert processed["prefill_decode-0"] == [], "prefill_decode has preprocessed media"


def processed_by(system: System, service: str, calls: Path) -> list[str]:
    """The kinds of media that any of its processes has given to the model's processor, call by call."""
    host = psutil.Process(system.service_pid(service))
    pids = {host.pid, *(child.pid for child in host.children(recursive=True))}
    lines = [line.split(" ", 1) for line in calls.read_text().splitlines()] if calls.exists() else []
    return [kinds for pid, kinds in lines if int(pid) in pids]


def layers_not_loaded(system: System) -> list[str]:
    """Parts of the model that prefill_decode does without, by its log."""
    lines = (system.logs_dir / "prefill_decode-0.log").read_text().splitlines()
    (line,) = [line for line in lines if '"prefill_decode ready"' in line]
    layers: list[str] = orjson.loads(line)["layers_not_loaded"]
    return layers
