"""Options of vLLM's own that features need, all of them in one engine."""

import json

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
MAX_STEP_TOKENS = 64  # so that most prompts with an image are computed in several steps
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser=hermes")  # change nothing of other requests
OPTIONS = (
    "--enable-lora",
    "--max-lora-rank=8",
    f"--speculative-config={json.dumps(DRAFTS)}",
    "--reasoning-parser=granite",
    # What structured output asks for holds from the first token on: this parser knows no end by tokens.
    f"--structured-outputs-config={json.dumps({'enable_in_reasoning': True})}",
    "--scheduling-policy=priority",
    "--max-num-seqs=8",
    f"--max-num-batched-tokens={MAX_STEP_TOKENS}",
)
