"""Cost of a request's answers: tokens × choices × log probabilities. Pure arithmetic on its body.

    log probabilities = tokens of all answers × those of each token
                      + tokens of all prompts × choices of each × those of each token

vLLM makes an object and a text of each log probability on the event loop that all requests share, so they are
bounded, and counted against a key's limit of tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

BYTES_PER_TOKEN = 4  # of a prompt's text, to estimate its tokens
LOGPROBS_PER_TOKEN = 20  # cost as much as a token
UNNAMED_TOKENS = 8192  # of an answer whose longest is not named
UNNAMED_COMPLETION_TOKENS = 16  # vLLM's default there
WHOLE_VOCABULARY = 100_000  # log probabilities, where all are asked for
ANSWER_FIELDS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def num_prompts(body: Mapping[str, Any]) -> int:
    """Return the number of prompts, each answered: texts, lists of token ids, or chats."""
    for name in ("prompt", "messages"):
        inputs = body.get(name)
        if isinstance(inputs, list) and inputs and isinstance(inputs[0], str | list):
            return len(inputs)
    return 1


def count_of(body: Mapping[str, Any], name: str) -> int | None:
    """Return the positive whole number of a field; None for any other value, which vLLM checks."""
    number = body.get(name)
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None


@dataclass(frozen=True, slots=True)
class AnswerCost:
    """Cost of answers, estimated from a body before it is served."""

    num_choices: int  # of all prompts
    tokens_each: int  # of one choice
    prompt_tokens: int
    choices_each: int  # of one prompt
    answer_logprobs: int  # of each token
    prompt_logprobs: int
    count_field: str  # that names the choices
    logprobs_field: str

    @classmethod
    def of(cls, body: Mapping[str, Any], num_prompt_bytes: int) -> Self:
        """Return the cost of `body` as sent, whose fields may have any type."""
        prompts = num_prompts(body)
        choices = max(_count_of(body, "n"), _count_of(body, "best_of"), 1)
        named = max(_count_of(body, name) for name in ANSWER_FIELDS)
        unnamed = UNNAMED_COMPLETION_TOKENS if "prompt" in body else UNNAMED_TOKENS
        of_answer = _logprobs_of(body, "top_logprobs") or _logprobs_of(body, "logprobs")
        of_prompt = _logprobs_of(body, "prompt_logprobs")
        field = "top_logprobs" if "top_logprobs" in body else "logprobs"
        if of_prompt:
            field = "prompt_logprobs"
        if "prompt" in body and body.get("echo") and of_answer > of_prompt:
            of_prompt, field = of_answer, "echo"
        if body.get("use_beam_search"):  # vLLM asks for twice the beams at each step of each
            of_answer, field = max(of_answer, 2 * choices), "use_beam_search"
        return cls(
            num_choices=choices * prompts,
            tokens_each=named or unnamed,
            prompt_tokens=num_prompt_bytes // BYTES_PER_TOKEN,
            choices_each=choices,
            answer_logprobs=of_answer,
            prompt_logprobs=of_prompt,
            count_field="n" if choices > 1 else "prompt" if "prompt" in body else "messages",
            logprobs_field=field,
        )

    @property
    def num_answer_tokens(self) -> int:
        """Largest number of tokens of all choices together."""
        return self.tokens_each * self.num_choices

    @property
    def num_logprobs(self) -> int:
        return self._logprobs(self.prompt_tokens, self.num_answer_tokens)

    def extra_tokens(self, prompt_tokens: int, answer_tokens: int) -> int:
        """Return the tokens charged for log probabilities of these prompt and answer tokens."""
        return self._logprobs(prompt_tokens, answer_tokens) // LOGPROBS_PER_TOKEN

    def _logprobs(self, prompt_tokens: int, answer_tokens: int) -> int:
        of_prompts = prompt_tokens * self.choices_each * self.prompt_logprobs
        return of_prompts + answer_tokens * self.answer_logprobs


def _count_of(body: Mapping[str, Any], name: str) -> int:
    return count_of(body, name) or 0


def _logprobs_of(body: Mapping[str, Any], name: str) -> int:
    """Return the log probabilities of each token with its own; 0 if none is requested."""
    value = body.get(name)
    if isinstance(value, bool):
        return int(value)
    if not isinstance(value, int) or value < -1 or (value == 0 and name == "top_logprobs"):
        return 0
    return WHOLE_VOCABULARY if value == -1 else value + 1
