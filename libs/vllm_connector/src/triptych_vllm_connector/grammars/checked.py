"""Host: a request's grammar is compiled by the compile server before the engine's client takes the request.

vLLM would convert it in this process, on its event loop, once per prompt. What vLLM checks in Python it still
checks; its calls into xgrammar's C++ code are left out here.
"""

import asyncio
import copy
import functools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NoReturn

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.engine.async_llm import AsyncLLM

from triptych_common.domain.hashing import tenant_of_salt
from triptych_vllm_connector.grammars.compiled import SLOW_FIELD
from triptych_vllm_connector.grammars.compiler import GrammarCompiler, GrammarRefusedError
from triptych_vllm_connector.grammars.grammar_job import GrammarJob
from triptych_vllm_connector.grammars.token_cost import GROUP_FIELD
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import replace

PARAM = "structured_outputs"
_GATEWAY_ID = re.compile(r"req-[0-9a-f]++")
_KINDS = ("json", "regex", "choice", "grammar", "structural_tag")


@asynccontextmanager
async def compiled_first(engine: Any, *, timeout_s: float, memory_bytes: int) -> AsyncIterator[None]:
    """Make `engine` (vLLM's `AsyncLLM`) take structured requests only once their grammar is compiled."""
    tokenizers = await asyncio.to_thread(_serialized_tokenizers, engine.vllm_config)
    leave_conversion_out()
    if not tokenizers:
        yield
        return
    async with GrammarCompiler.open(*tokenizers, timeout_s=timeout_s, memory_bytes=memory_bytes) as compiler:
        check_requests(engine, compiler)
        yield


def check_requests(engine: Any, compiler: GrammarCompiler) -> None:
    """Put a check in front of `engine.add_request`, which everything that generates goes through."""
    add_request = engine.add_request
    is_compact = engine.vllm_config.structured_outputs_config.disable_any_whitespace

    @functools.wraps(add_request)
    async def add_checked(request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(params, SamplingParams):
            params = await _checked(params, prompt, compiler, is_compact, group_of(request_id))
        return await add_request(request_id, prompt, params, *args, **kwargs)

    replace(engine, "add_request", add_checked, used_by=(AsyncLLM.generate,))


async def _checked(
    params: SamplingParams, prompt: Any, compiler: GrammarCompiler, is_compact: bool, group: str
) -> SamplingParams:
    """`params`, with the caller's request if there is a grammar, and a mark if it is slow.

    Raises:
        VLLMValidationError: the grammar cannot be compiled.
    """
    for name in (SLOW_FIELD, GROUP_FIELD):
        if name in (params.extra_args or {}):  # `vllm_xargs` of a caller
            raise VLLMValidationError(f"{name} may not be set", parameter="vllm_xargs")
    if params.structured_outputs is None:
        return params
    try:
        job = GrammarJob.try_from_params(params.structured_outputs, is_compact=is_compact)
        salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
        slow = None if job is None else await compiler.compile(job, tenant_of_salt(salt or ""))
    except GrammarRefusedError as error:
        kind = next(name for name in _KINDS if getattr(params.structured_outputs, name) is not None)
        raise VLLMValidationError(f"{PARAM}.{kind} {error}", parameter=PARAM) from None
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise VLLMValidationError(f"{PARAM} is not valid: {error}"[:500], parameter=PARAM) from error
    params = copy.copy(params)  # it may be of several prompts
    marks: dict[str, Any] = {GROUP_FIELD: group}
    if job is not None and slow is not None:
        marks[SLOW_FIELD] = [*slow.place, job.kind] if slow.place else []
    params.extra_args = {**(params.extra_args or {}), **marks}
    return params


def group_of(request_id: str) -> str:
    """Return the gateway's id of a caller's request, which vLLM's ids of prompts and beams contain."""
    found = _GATEWAY_ID.search(request_id)
    return request_id if found is None else found[0]


def _serialized_tokenizers(vllm_config: Any) -> list[str]:
    """Tokenizer facts as EngineCore makes them; none if vLLM refuses structured outputs for the engine."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    model_config = vllm_config.model_config
    if model_config.skip_tokenizer_init or model_config.is_diffusion or model_config.runner_type == "pooling":
        return []
    backend = XgrammarBackend(
        vllm_config,
        tokenizer=cached_tokenizer_from_config(model_config),
        vocab_size=model_config.get_vocab_size(),
    )
    serialized = [each.serialize_json() for each in seam.tokenizer_infos(backend)]
    return list(dict.fromkeys(serialized))  # most are equal


class _ConvertedElsewhere:
    """Replacement of xgrammar's `Grammar` where vLLM only checks that a text is valid."""

    @staticmethod
    def _accept(*_: Any, **__: Any) -> None: ...

    from_ebnf = from_json_schema = from_lark = from_regex = from_structural_tag = _accept


class _NotConverted:
    """Replacement of xgrammar's `Grammar` where vLLM would put the converted text into a larger grammar."""

    @staticmethod
    def from_lark(*_: Any, **__: Any) -> NoReturn:
        raise VLLMValidationError("a Lark grammar cannot be combined with tools: write it in EBNF")


def leave_conversion_out() -> None:
    """Keep callers' texts away from xgrammar in this process. EngineCore is another process."""
    import xgrammar
    from vllm.parser import abstract_parser
    from vllm.v1.structured_output import backend_xgrammar

    converting = SimpleNamespace(Grammar=_ConvertedElsewhere, StructuralTagItem=xgrammar.StructuralTagItem)
    replace(
        backend_xgrammar,
        "xgr",
        converting,
        used_by=(backend_xgrammar.validate_xgrammar_grammar,),
        everywhere=False,
    )
    replace(
        abstract_parser,
        "Grammar",
        _NotConverted,
        used_by=(abstract_parser.structured_outputs_to_format,),
        everywhere=False,
    )
    seam.try_no_grammars()
