"""Makes families, has their monoliths answer their questions, and says whether other media change answers.

    python -m tests.support.families.try_families [NAME ...]

One engine at a time, half a minute each. The exit code is 1 if a family failed.
"""

import itertools
import sys
import tempfile
import time
from pathlib import Path

from tests.support.families.answers import family_monolith, media_effect
from tests.support.families.folders import family_folder
from tests.support.families.questions import family_questions
from tests.support.families.registry import FAMILIES


def try_family(name: str, log_folder: Path) -> list[str]:
    """Prints a line; returns what is wrong."""
    at_s = [time.monotonic()]
    model = family_folder(name).name
    at_s.append(time.monotonic())
    questions = family_questions(FAMILIES[name])
    with family_monolith(name, log_folder) as server:
        at_s.append(time.monotonic())
        effects = [media_effect(server, model, question) for question in questions]
        at_s.append(time.monotonic())
    made_s, start_s, asked_s = (end - begin for begin, end in itertools.pairwise(at_s))
    num_other = sum(each.answer.token_ids != each.with_other_media.token_ids for each in effects)
    num_exchanged = sum(each.with_exchanged_media is not None for each in effects)
    num_tokens = [len(each.answer.prompt_token_ids) for each in effects]
    problems = [f"{name}: question {at}: {each.problem}" for at, each in enumerate(effects) if each.problem]
    print(
        f"{name}: made in {made_s:.0f} s, up in {start_s:.0f} s, "
        f"{2 * len(effects) + num_exchanged} answers in {asked_s:.0f} s, "
        f"prompts of {min(num_tokens)} to {max(num_tokens)} tokens, "
        f"other media: other tokens {num_other} times of {len(effects)}, unnoticed {len(problems)}",
        flush=True,
    )
    return problems


def main() -> int:
    wrong = []
    for name in sys.argv[1:] or FAMILIES:
        with tempfile.TemporaryDirectory(prefix="triptych-families-") as folder:
            try:
                wrong += try_family(name, Path(folder))
            except BaseException as error:  # a test's own failure is none of Exception
                if isinstance(error, KeyboardInterrupt):
                    raise
                wrong.append(f"{name}: {error}")
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
