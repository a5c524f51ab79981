"""A program: what one vLLM engine, in one process, answers to families' questions.

    python -m tests.support.families.answer_alone FOLDER DTYPE NAME ...

Writes FOLDER/NAME.json, one family after the other: vLLM is imported once for all of them.
"""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from tests.support.families.answers import TokenAnswer
from tests.support.families.folders import family_folder
from tests.support.families.questions import NUM_RIVALS, NUM_TOKENS, family_questions
from tests.support.families.registry import FAMILIES
from tests.support.real.system import MONOLITH_ENVIRONMENT

QUIET = {"VLLM_LOGGING_LEVEL": "WARNING"}


def answer(name: str, dtype: str) -> list[TokenAnswer]:
    """Family `name`'s, in the order of its questions."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    options = parser.parse_args(
        [
            f"--model={family_folder(name)}",
            f"--dtype={dtype}",
            "--enforce-eager",
            *FAMILIES[name].engine_options,
        ]
    )
    engine: Any = LLM.from_engine_args(EngineArgs.from_cli_args(options))
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=NUM_RIVALS, ignore_eos=True)
    found = []
    for question in family_questions(FAMILIES[name]):
        (output,) = engine.chat(question.body(name)["messages"], sampling, use_tqdm=False)
        (choice,) = output.outputs
        found.append(
            TokenAnswer(
                tuple(output.prompt_token_ids),
                tuple(choice.token_ids),
                tuple(
                    each[token].logprob for token, each in zip(choice.token_ids, choice.logprobs, strict=True)
                ),
                tuple(
                    tuple((token, found.logprob) for token, found in each.items()) for each in choice.logprobs
                ),
            )
        )
    return found


def main() -> None:
    os.environ.update(MONOLITH_ENVIRONMENT | QUIET)
    from vllm.distributed import cleanup_dist_env_and_memory  # after the environment is set

    folder, dtype, *names = sys.argv[1:]
    for name in names:
        answers = [asdict(each) for each in answer(name, dtype)]
        # Nothing is left for the next family's engine: groups of processes are made for a model's kind.
        cleanup_dist_env_and_memory()
        whole = Path(folder) / f"{name}.part"
        whole.write_bytes(orjson.dumps(answers))
        whole.rename(Path(folder) / f"{name}.json")


if __name__ == "__main__":
    main()
