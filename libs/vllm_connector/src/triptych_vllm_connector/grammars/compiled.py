"""EngineCore: slow grammars have a thread of their own, and the slowest come as the host had them compiled.

vLLM compiles in (cpus + 1) / 2 threads without a deadline: a grammar that takes seconds would keep all others
waiting, also those that are in its cache. Regular expressions alone have one, of 5 s by the wall clock: on a
busy machine a request would fail with 503 whose grammar the compile process has accepted.
"""

import functools
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triptych_vllm_connector.grammars.grammar_job import tokenizer_of
from triptych_vllm_connector.seams.current import seam
from triptych_vllm_connector.seams.replacing import is_wrapped, replace, require_names

SLOW_FIELD = "triptych_slow_grammar"
"""Host -> EngineCore, in `SamplingParams.extra_args`, of a grammar that is not light: path and inode of the
serialized `CompiledGrammar` and its kind, or nothing where it is to be compiled."""
MAX_READ = 32


GONE = "the compiled grammar is gone: send the request again"


class CompiledGrammarGoneError(Exception):
    """The host has forgotten the grammar meanwhile: only this request fails, and may be sent again."""

    def __init__(self) -> None:
        super().__init__(GONE)


class ReadGrammars:
    """Compiled grammars of recent requests, by inode. Used by one thread."""

    def __init__(self, *tokenizers: Any) -> None:
        """`tokenizers`: xgrammar's `TokenizerInfo`s, as `tokenizer_of` chooses among them."""
        self._tokenizers = tokenizers
        self._grammars: OrderedDict[int, Any] = OrderedDict()

    def read(self, path: str, inode: int, kind: str = "json") -> Any:
        """xgrammar's `CompiledGrammar` of a grammar of this kind.

        Raises:
            CompiledGrammarGoneError: `path` is another file by now, or none.
        """
        import xgrammar

        if (known := self._grammars.get(inode)) is not None:
            return known
        try:
            with Path(path).open("rb") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    raise CompiledGrammarGoneError
                file.seek(0)
                content = file.read().decode()
        except OSError as error:
            raise CompiledGrammarGoneError from error
        tokenizer = tokenizer_of(kind, self._tokenizers)
        compiled = xgrammar.CompiledGrammar.deserialize_json(content, tokenizer)
        self._grammars[inode] = compiled
        while len(self._grammars) > MAX_READ:
            self._grammars.popitem(last=False)
        return compiled


def use_slow_lane() -> None:
    """Make vLLM's `StructuredOutputManager` handle grammars apart that the host has marked as slow."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.structured_output import StructuredOutputManager as Manager
    from vllm.v1.structured_output import backend_xgrammar

    grammar_init, create_grammar = Manager.grammar_init, Manager._create_grammar
    if is_wrapped(grammar_init):
        return
    require_names((grammar_init,), "executor")
    slow_lane = ThreadPoolExecutor(1, "triptych-slow-grammars")  # its thread starts with the first of them

    @functools.wraps(grammar_init)
    def grammar_init_in_lane(self: Any, request: Any) -> None:
        if _place_of(request) is None:
            grammar_init(self, request)
            return
        executor, self.executor = self.executor, slow_lane  # vLLM calls this in one thread
        try:
            grammar_init(self, request)
        finally:
            self.executor = executor

    @functools.wraps(create_grammar)
    def create_or_read(self: Any, request: Any) -> Any:
        place = _place_of(request)
        return _read_grammar(self, request, place) if place else create_grammar(self, request)

    replace(Manager, "_create_grammar", create_or_read, used_by=(grammar_init,))
    replace(Manager, "grammar_init", grammar_init_in_lane, used_by=(EngineCore.preprocess_add_request,))
    replace(
        backend_xgrammar,
        "compile_regex_with_timeout",
        lambda compile_regex, pattern: compile_regex(pattern),
        used_by=(backend_xgrammar.XgrammarBackend.compile_grammar,),
        everywhere=False,
    )


def _place_of(request: Any) -> list[Any] | None:
    """Location of a slow grammar; None for a light one."""
    place: list[Any] | None = (request.sampling_params.extra_args or {}).get(SLOW_FIELD)
    return place


def _read_grammar(manager: Any, request: Any, place: list[Any]) -> Any:
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    backend = manager.backend
    grammars = getattr(manager, "triptych_read_grammars", None)
    if grammars is None:
        grammars = manager.triptych_read_grammars = ReadGrammars(*seam.tokenizer_infos(backend))
    compiled = grammars.read(*place)
    stop_token_ids = request.sampling_params.all_stop_token_ids
    matcher = xgrammar.GrammarMatcher(
        compiled, override_stop_tokens=list(stop_token_ids) if stop_token_ids else None
    )
    return XgrammarGrammar(vocab_size=backend.vocab_size, matcher=matcher, ctx=compiled)
