"""A program: what one vLLM engine, in one process, answers to batches of requests.

    python -m tests.support.real.batches BATCHES ANSWERS

A batch is a list of requests, each the fields of vLLM's `SamplingParams`; all of a batch start in one step.
The answer to each is its choices: token ids, log probabilities by token, and those of the prompt.
"""

import math
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from tests.support.real.system import DEMO_MODEL, MONOLITH_ENVIRONMENT

PROMPT = "read the digits 1 2 3"
QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


def main() -> None:
    batches, out = map(Path, sys.argv[1:])
    os.environ.update(MONOLITH_ENVIRONMENT | QUIET)
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

    def params(fields: dict[str, Any]) -> Any:
        values = dict(fields)
        if "structured_outputs" in values:
            values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
        if "repetition_detection" in values:
            values["repetition_detection"] = RepetitionDetectionParams(**values["repetition_detection"])
        if "logit_bias" in values:
            values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
        return SamplingParams(**values)

    engine = LLM(
        str(DEMO_MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        enable_prefix_caching=False,  # prompts are computed anew, so that nothing is shared but the batch
        limit_mm_per_prompt={"image": 0, "video": 0},
    )

    def shown(table: Any) -> Any:
        """Without tokens that cannot come: which of them vLLM names is by chance."""
        if table is None:
            return None
        return {str(token): each.logprob for token, each in table.items() if each.logprob > -math.inf}

    answers = []
    for batch in orjson.loads(batches.read_bytes()):
        outputs = engine.generate([PROMPT] * len(batch), [params(each) for each in batch], use_tqdm=False)
        answers.append(
            [
                {
                    "prompt": [shown(each) for each in output.prompt_logprobs or ()],
                    "choices": [
                        {
                            "tokens": list(choice.token_ids),
                            "text": choice.text,
                            "end": [choice.finish_reason, choice.stop_reason],
                            "logprobs": [shown(each) for each in choice.logprobs or ()],
                        }
                        for choice in output.outputs
                    ],
                }
                for output in outputs
            ]
        )
    out.write_bytes(orjson.dumps(answers))


if __name__ == "__main__":
    main()
