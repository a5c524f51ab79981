"""EngineCore: slow grammars have a thread of their own, and the slowest come as the host had them compiled.

vLLM compiles in (cpus + 1) / 2 threads without a deadline: a grammar that takes seconds would keep all others
waiting, also those that are in its cache.
"""

import functools
import os
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SLOW_FIELD = "triptych_slow_grammar"
"""Host -> EngineCore, in `SamplingParams.extra_args`, of a grammar that is not light: path and inode of the
serialized `CompiledGrammar`, or nothing where it is to be compiled."""
MAX_READ = 32


class CompiledGrammarGoneError(Exception):
    """The host has forgotten the grammar meanwhile: only this request fails."""


class ReadGrammars:
    """Compiled grammars of recent requests, by inode. Used by one thread."""

    def __init__(self, tokenizer_info: Any) -> None:
        self._tokenizer_info = tokenizer_info
        self._grammars: OrderedDict[int, Any] = OrderedDict()

    def read(self, path: str, inode: int) -> Any:
        """xgrammar's `CompiledGrammar`.

        Raises:
            CompiledGrammarGoneError: `path` is another file by now, or none.
        """
        import xgrammar

        if (known := self._grammars.get(inode)) is not None:
            return known
        try:
            with Path(path).open("rb") as file:
                if os.fstat(file.fileno()).st_ino != inode:
                    raise CompiledGrammarGoneError(path)
                file.seek(0)
                content = file.read().decode()
        except OSError as error:
            raise CompiledGrammarGoneError(path) from error
        compiled = xgrammar.CompiledGrammar.deserialize_json(content, self._tokenizer_info)
        self._grammars[inode] = compiled
        while len(self._grammars) > MAX_READ:
            self._grammars.popitem(last=False)
        return compiled


def use_slow_lane() -> None:
    """Make vLLM's `StructuredOutputManager` handle grammars apart that the host has marked as slow."""
    from vllm.v1.structured_output import StructuredOutputManager as Manager

    grammar_init, create_grammar = Manager.grammar_init, Manager._create_grammar
    if getattr(grammar_init, "_triptych", False):
        return
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

    grammar_init_in_lane._triptych = True  # type: ignore[attr-defined]
    Manager.grammar_init, Manager._create_grammar = grammar_init_in_lane, create_or_read


def _place_of(request: Any) -> list[Any] | None:
    """Location of a slow grammar; None for a light one."""
    place: list[Any] | None = (request.sampling_params.extra_args or {}).get(SLOW_FIELD)
    return place


def tokenizer_info_of(backend: Any) -> Any:
    """Return the tokenizer facts that vLLM's `XgrammarBackend` derives and does not keep."""
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    return backend.compile_grammar(StructuredOutputOptions.JSON_OBJECT, "").ctx.tokenizer_info


def _read_grammar(manager: Any, request: Any, place: list[Any]) -> Any:
    import xgrammar
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    backend = manager.backend
    grammars = getattr(manager, "triptych_read_grammars", None)
    if grammars is None:
        grammars = manager.triptych_read_grammars = ReadGrammars(tokenizer_info_of(backend))
    compiled = grammars.read(*place)
    stop_token_ids = request.sampling_params.all_stop_token_ids
    matcher = xgrammar.GrammarMatcher(
        compiled, override_stop_tokens=list(stop_token_ids) if stop_token_ids else None
    )
    return XgrammarGrammar(vocab_size=backend.vocab_size, matcher=matcher, ctx=compiled)
