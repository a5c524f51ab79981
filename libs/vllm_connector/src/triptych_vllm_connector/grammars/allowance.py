"""CPU time that a request's grammar may take in the engine, and a first look at what it takes.

The compile process walks through a grammar before any engine has it: with 150,000 tokens a mask for
`.{1,500}` takes 30 ms, and all requests of the batch would wait for each. Where the walk exceeds the
allowance, the caller gets 400 instead of an answer that breaks off.
"""

import random
import time
from dataclasses import dataclass
from typing import Any

FREE_S = 0.25
"""CPU seconds that a request's grammar may take beyond what its tokens have earned, at any time."""
PER_STEP_S = 0.005
"""CPU seconds that a step of the engine earns; most JSON schemas take a tenth of it."""
PER_TOKEN_S = 0.0005
"""CPU seconds that each token of all choices earns besides."""
_WALK_TOKENS = 64
_WORD_BITS = 32  # of a mask's words


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

    def take(self, cpu_s: float) -> bool:
        """Add what a call has taken; return whether it was allowed."""
        self.debt_s += cpu_s
        return self.debt_s <= FREE_S


def exceeds_allowance(compiled: Any, vocab_size: int) -> bool:
    """Return whether tokens drawn at random take more than one choice may take.

    Args:
        compiled: xgrammar's `CompiledGrammar`.
    """
    import xgrammar

    rng, allowance = random.Random(0), Allowance()
    matcher, mask = xgrammar.GrammarMatcher(compiled), xgrammar.allocate_token_bitmask(1, vocab_size)
    for num_tokens in range(_WALK_TOKENS):
        began_s = time.thread_time()
        matcher.fill_next_token_bitmask(mask, 0)
        token = _any_of(mask[0].tolist(), rng)
        if token is None or not matcher.accept_token(token) or matcher.is_terminated():
            return False
        if not allowance.take(time.thread_time() - began_s):
            return True
        allowance.earn(num_tokens + 1, 1)
    return False


def _any_of(words: list[int], rng: random.Random) -> int | None:
    """Return a token that the mask allows, without listing all of them."""
    first = rng.randrange(len(words))
    for index in (*range(first, len(words)), *range(first)):
        if words[index]:
            bits = [bit for bit in range(_WORD_BITS) if words[index] >> bit & 1]
            return index * _WORD_BITS + rng.choice(bits)
    return None
