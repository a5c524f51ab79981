"""EngineCore: limit on the CPU time of a request's grammar. A request above it ends with an error.

The grammar `root ::= "a" | root root` compiles at once. Its 200th token costs 5 ms of the engine's thread
and its 1,600th costs seconds: xgrammar's parser takes cubic time for ambiguous grammars. All requests of the
batch wait meanwhile.
"""

import functools
import time
from typing import Any

from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

FREE_S = 0.5
"""CPU seconds that a request's grammar may take regardless of its number of tokens."""
PER_TOKEN_S = 0.005
"""Additional CPU seconds per token, on average; JSON schemas take a hundredth of it."""
_COST = "triptych_cpu_s"


def bound_token_cost() -> None:
    """Have vLLM's xgrammar grammars refuse a token when all before it have cost too much.

    vLLM ends a request whose token is refused. A thread's CPU time is counted, not the wait for a core.
    """
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar as Grammar

    fill_bitmask, accept_tokens = Grammar.fill_bitmask, Grammar.accept_tokens
    if hasattr(accept_tokens, "__wrapped__"):
        return

    @functools.wraps(fill_bitmask)
    def fill_counted(self: Any, bitmask: Any, idx: int) -> None:
        began_s = time.thread_time()
        fill_bitmask(self, bitmask, idx)
        _add(self, time.thread_time() - began_s)

    @functools.wraps(accept_tokens)
    def accept_counted(self: Any, request_id: str, tokens: list[int]) -> bool:
        began_s = time.thread_time()
        is_accepted = accept_tokens(self, request_id, tokens)
        cpu_s = _add(self, time.thread_time() - began_s)
        num_tokens = self.num_processed_tokens
        if cpu_s <= FREE_S + PER_TOKEN_S * num_tokens:
            return is_accepted
        log.warning(
            "request ended: its grammar costs too much with each token",
            request_id=request_id,
            cpu_s=round(cpu_s, 3),
            num_tokens=num_tokens,
        )
        return False

    Grammar.fill_bitmask, Grammar.accept_tokens = fill_counted, accept_counted


def _add(grammar: Any, cpu_s: float) -> float:
    """Return the sum of what `grammar` has cost."""
    total_s: float = getattr(grammar, _COST, 0.0) + cpu_s
    setattr(grammar, _COST, total_s)
    return total_s
