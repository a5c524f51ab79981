"""Guards in vLLM's own code of this process, against requests that would stall or end what all share.

error texts      cut before vLLM's sanitiser: its expressions take cubic time, 90 s for 14 kB
sampling tables  bounds of the GPU runner's tables checked here: beyond them it raises inside the engine
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.entrypoints.serve.exception_handling import utils as error_texts
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_ALLOWED_TOKEN_IDS,
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
)

from triptych_vllm_connector.seams.replacing import SeamNotFoundError, is_wrapped, replace

MAX_ERROR_CHARS = 1000  # some 20 ms of vLLM's expressions at their worst


def guard_requests() -> None:
    """Install the guards, before vLLM's application is built. Idempotent.

    Raises:
        SeamNotFoundError: vLLM has something else there, so that a guard would not be used.
    """
    _cut_error_texts()
    _check_tables_first()


def cut(text: str) -> str:
    """`text` limited to `MAX_ERROR_CHARS`."""
    return text if len(text) <= MAX_ERROR_CHARS else text[:MAX_ERROR_CHARS] + "… [cut]"


def _cut_error_texts() -> None:
    """Replace vLLM's sanitiser wherever it is bound; later imports take it from `utils`."""
    from vllm.entrypoints.serve.exception_handling import error_response

    sanitise: Any = getattr(error_texts, "sanitize_message", None)
    if not is_wrapped(sanitise):
        users = (error_response.create_error_response,)
        replace(error_texts, "sanitize_message", _cutting(sanitise), used_by=users)
    message = error_response.create_error_response("x" * 10 * MAX_ERROR_CHARS).error.message
    if len(message) >= 2 * MAX_ERROR_CHARS:
        raise SeamNotFoundError("vLLM's error responses do not pass its sanitiser any more")


def _cutting(sanitise: Callable[[str], str]) -> Callable[[str], str]:
    @functools.wraps(sanitise)
    def sanitise_cut(message: str) -> str:
        return sanitise(cut(message))

    return sanitise_cut


def _check_tables_first() -> None:
    """Check after `update_from_tokenizer`, vLLM's last step, when words and ends have their tokens."""
    update = SamplingParams.update_from_tokenizer
    if is_wrapped(update):
        return

    @functools.wraps(update)
    def update_and_check(params: SamplingParams, tokenizer: TokenizerLike) -> None:
        update(params, tokenizer)
        check_sampling_tables(params)

    replace(
        SamplingParams, "update_from_tokenizer", update_and_check, used_by=(InputProcessor.process_inputs,)
    )


def check_sampling_tables(params: SamplingParams) -> None:
    """Refuse parameters that exceed the tables of vLLM's GPU runner.

    Raises:
        VLLMValidationError: answered by 400.
    """
    bad_words = params.bad_words_token_ids or []
    num_stops = len(params.all_stop_token_ids) if params.min_tokens > 0 else 0
    for field, number, of, bound in (
        ("allowed_token_ids", len(params.allowed_token_ids or ()), "token ids", MAX_NUM_ALLOWED_TOKEN_IDS),
        ("logit_bias", len(params.logit_bias or ()), "token ids", MAX_NUM_LOGIT_BIAS_TOKENS),
        ("bad_words", len(bad_words), "spellings", envs.VLLM_MAX_NUM_BAD_WORDS),
        ("bad_words", sum(map(len, bad_words)), "tokens", envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS),
        ("stop_token_ids", num_stops, "token ids beside min_tokens", MAX_NUM_STOP_TOKEN_IDS),
    ):
        if number > bound:
            raise VLLMValidationError(f"{field} has {number} {of}; {bound} at most", parameter=field)
