"""EngineCore: masks for a part of the vocabulary, whose cost shows what the whole mask will cost.

xgrammar's call that makes a mask cannot be interrupted. With 150,000 tokens most masks take 0.03 ms, but that
of the pattern `^([^#]*|#(.{1,500}a|.{1,501}b|.{1,502}c|…))$` takes seconds behind its `#`. No walk through a
grammar meets all of its states, so each answer is followed by matchers of the same grammar with fewer tokens:

    37 tokens --> 2,344 tokens --> 150,000 tokens
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

SHARE = 64
"""Tokens of the next larger vocabulary for each token of a smaller one."""
NEXT_COSTS = SHARE / 3
"""Least cost of a mask in proportion to the next smaller vocabulary's: 21 to 46 were seen where masks take
more than 5 ms, less where they are cheap."""
MIN_TOKENS = 8
MAX_KEPT = 64  # compiled grammars, for each vocabulary


class TrialMatchers:
    """Matchers of one grammar of a request, which have accepted what the request's own has accepted."""

    def __init__(self, matchers: Sequence[Any], masks: Sequence[Any], texts: Sequence[bytes]) -> None:
        self._matchers, self._masks, self._texts = matchers, masks, texts
        self._are_followed: list[bool] = []  # of each token that the request's matcher has accepted

    def __len__(self) -> int:
        return len(self._matchers)

    def fill(self, index: int) -> Any:
        """Make and return the mask of one of the vocabularies, the smallest first."""
        self._matchers[index].fill_next_token_bitmask(self._masks[index], 0)
        return self._masks[index]

    def accept(self, token: int, *, is_last: bool) -> None:
        """Follow a token that the request's matcher has accepted; `is_last`: it has ended the answer."""
        self._are_followed.append(not is_last)
        if not is_last and not all(each.accept_string(self._texts[token]) for each in self._matchers):
            self._matchers = ()  # a structural tag names the token by its id: nothing is tried any more

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        split = len(self._are_followed) - num_tokens
        num_followed = sum(self._are_followed[split:])
        del self._are_followed[split:]
        if num_followed:
            for each in self._matchers:
                each.rollback(num_followed)


class TrialVocabularies:
    """Parts of an engine's vocabulary, and grammars compiled for them. Used by several threads."""

    def __init__(self, tokenizer_info: Any) -> None:
        """`tokenizer_info`: xgrammar's `TokenizerInfo` of all tokens."""
        import xgrammar

        self._texts: list[bytes] = tokenizer_info.decoded_vocab
        texts = sorted({*self._texts} - {b""})
        self.parts = [texts[::share] for share in (SHARE**2, SHARE) if len(texts) >= MIN_TOKENS * share]
        # xgrammar's own cache refuses grammars with regular expressions in them.
        self._compilers = [
            xgrammar.GrammarCompiler(
                xgrammar.TokenizerInfo(
                    [*part, b""], vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[len(part)]
                ),
                max_threads=1,
                cache_enabled=False,
            )
            for part in self.parts
        ]
        self._compiled: OrderedDict[bytes, list[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def matchers_of(self, compiled: Any) -> TrialMatchers:
        """Return new matchers of xgrammar's `CompiledGrammar`, which has all tokens."""
        import xgrammar

        try:
            grammars = self._compiled_for_parts(compiled.grammar)
        except RuntimeError as error:  # xgrammar's errors have no class of their own
            log.warning("masks of a grammar are not tried before they are made", error=str(error)[:200])
            grammars = []
        return TrialMatchers(
            [xgrammar.GrammarMatcher(each) for each in grammars],
            [xgrammar.allocate_token_bitmask(1, len(part) + 1) for part in self.parts],
            self._texts,
        )

    def _compiled_for_parts(self, grammar: Any) -> list[Any]:
        if not self._compilers:
            return []
        key = hashlib.blake2b(str(grammar).encode(errors="surrogatepass"), digest_size=32).digest()
        with self._lock:
            found = self._compiled.get(key)
        if found is None:
            found = [each.compile_grammar(grammar) for each in self._compilers]
        with self._lock:
            self._compiled[key] = found
            self._compiled.move_to_end(key)
            if len(self._compiled) > MAX_KEPT:
                self._compiled.popitem(last=False)
        return found
