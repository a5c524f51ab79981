"""CPU time that a request's grammar may take in the engine, and a first look at what it takes.

The compile process walks through a grammar before any engine has it: with 150,000 tokens a mask for
`.{1,500}` takes 30 ms, and all requests of the batch would wait for each. Where the walk exceeds the
allowance, the caller gets 400 instead of an answer that breaks off.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

FREE_S = 0.25
"""CPU seconds that a request's grammar may take beyond what its tokens have earned, at any time."""
PER_STEP_S = 0.005
"""CPU seconds that a step of the engine earns; most JSON schemas take a tenth of it."""
PER_TOKEN_S = 0.0005
"""CPU seconds that each token of all choices earns besides."""
SHARED_DEBT_S = 0.05
"""CPU seconds that a request may owe while the grammars of a step take more than `FREE_S` together."""
_WALK_TOKENS = 64
_WALK_RUNS = 16
_WORD_BITS = 32  # of a mask's words, which are signed
_WORD = (1 << _WORD_BITS) - 1


@dataclass(slots=True)
class Allowance:
    """Leaky bucket of one caller's request: what it does not take of a step, it does not keep for later ones.

    So in any span of its answer the grammar takes `FREE_S` and what the tokens of that span earn, at most.
    """

    debt_s: float = 0.0
    num_steps: int = 0  # tokens of the longest choice
    num_tokens: int = 0  # tokens of all choices

    def earn(self, num_steps: int, num_tokens: int) -> None:
        """Count `num_tokens` further ones, of a choice that has `num_steps` now."""
        new_steps = max(0, num_steps - self.num_steps)
        self.num_steps, self.num_tokens = self.num_steps + new_steps, self.num_tokens + num_tokens
        self.debt_s = max(0.0, self.debt_s - PER_STEP_S * new_steps - PER_TOKEN_S * num_tokens)

    def earn_row(self) -> None:
        """Count a further mask of the same choice in a step, for a draft token that may be rejected."""
        self.debt_s = max(0.0, self.debt_s - PER_STEP_S)

    def take(self, cpu_s: float) -> bool:
        """Add what a call has taken; return whether it was allowed."""
        self.debt_s += cpu_s
        return self.debt_s <= FREE_S


@dataclass(slots=True)
class EngineStep:
    """CPU time that the grammars of all requests take in one step of the engine, for which all of them wait.

    Beyond `FREE_S`, a call that takes more than a step earns ends its request if that owes more than
    `SHARED_DEBT_S`. So several costly grammars end after a call or two each, not after `FREE_S` each; many
    ordinary ones go on, whatever they take together.
    """

    cpu_s: float = 0.0
    number: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)  # vLLM may fill masks in several threads

    def begin(self) -> None:
        """Begin the next step."""
        with self._lock:
            self.cpu_s = 0.0
            self.number += 1

    def longest_s(self, allowance: Allowance) -> float:
        """Return the CPU seconds that a call of a request may take now."""
        with self._lock:
            return self._longest_s(allowance)

    def take(self, allowance: Allowance, cpu_s: float) -> bool:
        """Add what a call of a request has taken; return whether it was allowed."""
        with self._lock:
            is_allowed = cpu_s <= self._longest_s(allowance)
            self.cpu_s += cpu_s
            allowance.take(cpu_s)
            return is_allowed

    def _longest_s(self, allowance: Allowance) -> float:
        of_step_s = max(FREE_S - self.cpu_s, PER_STEP_S, SHARED_DEBT_S - allowance.debt_s)
        return min(of_step_s, FREE_S - allowance.debt_s)


def longest_runs(texts: Sequence[bytes]) -> list[int]:
    """Return the longest token of each repeated byte, the longest of all first."""
    runs = [token for token, text in enumerate(texts) if len(text) > 1 and text == text[:1] * len(text)]
    runs.sort(key=lambda token: len(texts[token]))
    longest = {texts[token][0]: token for token in runs}  # the last of each byte stays
    return sorted(longest.values(), key=lambda token: -len(texts[token]))


def exceeds_allowance(compiled: Any, vocab_size: int, runs: Sequence[int] = ()) -> bool:
    """Return whether an answer takes more than one choice may take: of random tokens, or of long runs.

    Args:
        compiled: xgrammar's `CompiledGrammar`.
        runs: the vocabulary's `longest_runs`: an ambiguous grammar takes cubic time for them.
    """
    return _walk_exceeds(compiled, vocab_size, (), _WALK_TOKENS) or (
        bool(runs) and _walk_exceeds(compiled, vocab_size, runs, _WALK_RUNS)
    )


def _walk_exceeds(compiled: Any, vocab_size: int, preferred: Sequence[int], num_tokens: int) -> bool:
    import xgrammar

    rng, allowance = random.Random(0), Allowance()
    matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, vocab_size)
    stop = compiled.tokenizer_info.stop_token_ids
    for number in range(1, num_tokens + 1):
        began_s = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        words = mask[0].tolist()
        for each in stop:  # an answer that may end need not end here
            words[each // _WORD_BITS] &= _WORD & ~(1 << each % _WORD_BITS)
        token = next((each for each in preferred if _has(words, each)), None)
        if token is None:
            token = _any_of(words, rng)
        if token is None or not matcher.accept_token(token):
            return False
        if not allowance.take(time.thread_time() - began_s):
            return True
        allowance.earn(number, 1)
    return False


def _has(words: list[int], token: int) -> bool:
    return bool(words[token // _WORD_BITS] >> token % _WORD_BITS & 1)


def _any_of(words: list[int], rng: random.Random) -> int | None:
    """Return a token that the mask allows, without listing all of them."""
    first = rng.randrange(len(words))
    for index in (*range(first, len(words)), *range(first)):
        if words[index]:
            bits = [bit for bit in range(_WORD_BITS) if words[index] >> bit & 1]
            return index * _WORD_BITS + rng.choice(bits)
    return None
