"""EngineCore: limit on the CPU time of a request's grammar. A request above it ends with an error.

The grammar `root ::= "a" | root root` compiles at once. Its 200th token costs 5 ms of the engine's thread
and its 1,600th costs seconds: xgrammar's parser takes cubic time for ambiguous grammars. All requests of the
batch wait meanwhile. All choices of a caller's request share one allowance, since one step has them all.
Requests share a step: where several grammars are costly at once, each of them has less (`EngineStep`).

A call of xgrammar cannot be interrupted. Masks are made in a thread that can be left behind (`mask_threads`).
Vocabularies have tokens of more than 100 spaces: with an ambiguous grammar one such token costs seconds. So a
long token is tried in pieces first, which end with the allowance.
"""

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from triptych_common.cores.usable import core_quota, num_usable_cores, usable_cores
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.grammars.allowance import Allowance, EngineStep
from triptych_vllm_connector.grammars.mask_threads import MaskThreads
from triptych_vllm_connector.seams.replacing import is_wrapped, replace, require_names

log = get_logger(__name__)

GROUP_FIELD = "triptych_grammar_group"
"""Host -> EngineCore, in `SamplingParams.extra_args`: name of the caller's request, of which this one is a
prompt, a choice or a beam."""
MAX_ACCOUNTS = 4096
PIECE_BYTES = 16
"""Largest part of a token that xgrammar parses in one call."""
_ACCOUNT = "triptych_account"
_MASK = "triptych_mask"
_MASKS_OF_A_THREAD = 64
_MAX_THREADS = 8
_ALL_TOKENS = -1  # of a word of a bitmask


@dataclass(slots=True)
class Account:
    """Allowance of one caller's request, until it is spent."""

    name: str = ""
    step: EngineStep = field(default_factory=EngineStep)
    allowance: Allowance = field(default_factory=Allowance)
    is_spent: bool = False  # for good: a refused token may be a draft that stays in the matcher
    long_tokens: Mapping[int, bytes] = field(default_factory=dict)

    def charge(self, cpu_s: float, *, goes_on: bool = False) -> None:
        """Add what a call has taken; end the request if that was too much, or if the call still goes on."""
        is_allowed = self.step.take(self.allowance, cpu_s)
        if (goes_on or not is_allowed) and not self.is_spent:
            self.is_spent = True
            log.warning(
                "request ended: its grammar costs too much with each token",
                request_id=self.name,
                cpu_s=round(cpu_s, 3),
                step_cpu_s=round(self.step.cpu_s, 3),
                num_tokens=self.allowance.num_tokens,
            )


class GrammarMask:
    """Mask of one grammar's next token. Its memory is its own: a thread left behind may write it later."""

    def __init__(self, fill: Callable[[Any, int], None], account: Account, bitmask: Any) -> None:
        """`fill` makes a row of a tensor such as `bitmask`."""
        self.row = bitmask.new_empty((1, bitmask.shape[1]))
        self.filled_in: int | None = None
        """Number of the step for which the last mask was made."""
        self.is_new = False  # made, and not used yet
        self.is_left = False  # for good: a thread has the matcher
        self._fill, self._account, self._cpu_s = fill, account, 0.0

    def make(self) -> None:
        self._cpu_s = 0.0
        if not self._account.is_spent:
            began_s = time.thread_time()
            self._fill(self.row, 0)
            self._cpu_s = time.thread_time() - began_s

    def finish(self) -> None:
        self.is_new, self.filled_in = True, self._account.step.number
        self._account.charge(self._cpu_s)

    def leave(self) -> None:
        self.is_left = True
        self._account.charge(self.longest_s(), goes_on=True)

    def longest_s(self) -> float:
        return self._account.step.longest_s(self._account.allowance)


class Accounts:
    """Accounts of recent requests, by name. vLLM makes grammars in several threads."""

    def __init__(self, step: EngineStep) -> None:
        self._step = step
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._long_tokens: dict[int, bytes] | None = None
        self._lock = threading.Lock()

    def of(self, name: str, grammar: Any) -> Account:
        """Return the account of the caller's request `name`, a new one for a new name.

        Args:
            grammar: vLLM's `XgrammarGrammar`, whose tokenizer all grammars of the engine have.
        """
        with self._lock:
            if self._long_tokens is None:
                texts = enumerate(grammar.ctx.tokenizer_info.decoded_vocab)
                self._long_tokens = {token: text for token, text in texts if len(text) > PIECE_BYTES}
            account = self._accounts.setdefault(
                name, Account(name, self._step, long_tokens=self._long_tokens)
            )
            self._accounts.move_to_end(name)
            if len(self._accounts) > MAX_ACCOUNTS:
                self._accounts.popitem(last=False)
        return account


def bound_token_cost() -> None:
    """Have vLLM's xgrammar grammars refuse tokens of a request that has taken more than it may.

    vLLM ends a request whose token is refused. A thread's CPU time is counted, not the wait for a core.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager as Manager
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar as Grammar

    fill_bitmask, accept_tokens = Grammar.fill_bitmask, Grammar.accept_tokens
    validate_tokens, rollback = Grammar.validate_tokens, Grammar.rollback
    grammar_bitmask = Manager.grammar_bitmask
    if is_wrapped(accept_tokens):
        return
    step, threads = EngineStep(), MaskThreads()
    max_threads = min(_MAX_THREADS, num_usable_cores(len(usable_cores()), core_quota()) // 2 or 1)
    accounts = Accounts(step)

    @functools.wraps(grammar_bitmask)
    def make_masks_first(self: Any, requests: Any, names: list[str], drafts: Mapping[str, Any]) -> Any:
        """Make the masks of a step at once; vLLM asks for one after another."""
        step.begin()
        undrafted = (name for name in names if not drafts.get(name))
        grammars = (requests[name].structured_output_request.grammar for name in undrafted)
        masks = [mask for each in grammars if (mask := _mask_of(each)) and not each.is_terminated()]
        threads.make(masks, min(max_threads, 1 + len(masks) // _MASKS_OF_A_THREAD))
        return grammar_bitmask(self, requests, names, drafts)

    @functools.wraps(fill_bitmask)
    def fill_counted(self: Any, bitmask: Any, idx: int) -> None:
        account, mask = _account_of(self), _mask_of(self)
        if mask is None:
            # The matcher's function, not the grammar's: a circle would keep both from being freed at once.
            mask = GrammarMask(self.matcher.fill_next_token_bitmask, account, bitmask)
            setattr(self, _MASK, mask)
        if mask.filled_in != step.number:
            threads.make([mask])
        elif not mask.is_new:
            account.allowance.earn_row()
            threads.make([mask])
        mask.is_new = False
        if account.is_spent:  # the token that comes of it is refused
            bitmask[idx].fill_(_ALL_TOKENS)
        else:
            bitmask[idx].copy_(mask.row[0])

    @functools.wraps(rollback)
    def rollback_unless_left(self: Any, num_tokens: int) -> None:
        mask = _mask_of(self)
        if mask is None or not mask.is_left:
            rollback(self, num_tokens)

    @functools.wraps(accept_tokens)
    def accept_counted(self: Any, request_id: str, tokens: list[int]) -> bool:
        account = _account_of(self)
        for token in tokens:
            if account.is_spent:
                return False
            num_before = self.num_processed_tokens
            accept_next = functools.partial(accept_tokens, self, request_id, [token])
            is_accepted = _accept(self.matcher, token, account, accept_next)
            account.allowance.earn(self.num_processed_tokens, self.num_processed_tokens - num_before)
            if not is_accepted:
                return False
        return not account.is_spent

    @functools.wraps(validate_tokens)
    def validate_counted(self: Any, tokens: list[int]) -> list[int]:
        """Do as vLLM's function does, until the allowance is spent; draft tokens earn nothing."""
        account, matcher = _account_of(self), self.matcher
        valid: list[int] = []
        try:
            for token in tokens:
                if account.is_spent or matcher.is_terminated():
                    break
                if not _accept(matcher, token, account, functools.partial(matcher.accept_token, token)):
                    break
                valid.append(token)
        finally:
            if valid:
                matcher.rollback(len(valid))
        return valid

    create_grammar = Manager._create_grammar

    @functools.wraps(create_grammar)
    def create_with_account(self: Any, request: Any) -> Any:
        grammar = create_grammar(self, request)
        name = (request.sampling_params.extra_args or {}).get(GROUP_FIELD, request.request_id)
        setattr(grammar, _ACCOUNT, accounts.of(name, grammar))
        return grammar

    replace(Grammar, "fill_bitmask", fill_counted, used_by=(Manager._fill_bitmasks,))
    replace(Grammar, "accept_tokens", accept_counted, used_by=(Manager.accept_tokens,))
    require_names((fill_bitmask,), "matcher", "fill_next_token_bitmask")
    require_names((validate_tokens,), "accept_token", "is_terminated", "rollback")
    replace(Grammar, "validate_tokens", validate_counted, used_by=(Manager.validate_tokens,))
    replace(Grammar, "rollback", rollback_unless_left, used_by=(grammar_bitmask,))
    replace(Manager, "grammar_bitmask", make_masks_first, used_by=(Scheduler.get_grammar_bitmask,))
    replace(Manager, "_create_grammar", create_with_account, used_by=(Manager.grammar_init,))
    require_names((Scheduler.update_from_output,), "accept_tokens")


def _accept(matcher: Any, token: int, account: Account, accept: Callable[[], bool]) -> bool:
    """Call `accept`, unless the token is long and costs more than the request may take; charge it."""
    text = account.long_tokens.get(token)
    if text:
        return _is_affordable(matcher, text, account) and accept()
    began_s = time.thread_time()
    is_accepted = accept()
    account.charge(time.thread_time() - began_s)
    return is_accepted


def _is_affordable(matcher: Any, text: bytes, account: Account) -> bool:
    """Charge a token's bytes, for this trial and for its acceptance. Return whether the allowance lasts.

    The matcher stays as it is.
    """
    num_pieces = 0
    try:
        for start in range(0, len(text), PIECE_BYTES):
            began_s = time.thread_time()
            is_accepted = matcher.accept_string(text[start : start + PIECE_BYTES])
            num_pieces += is_accepted
            account.charge(2 * (time.thread_time() - began_s))
            if account.is_spent or not is_accepted:  # a refused token is xgrammar's to judge
                break
    finally:
        matcher.rollback(num_pieces)
    return not account.is_spent


def _mask_of(grammar: Any) -> GrammarMask | None:
    mask: GrammarMask | None = getattr(grammar, _MASK, None)
    return mask


def _account_of(grammar: Any) -> Account:
    account: Account | None = getattr(grammar, _ACCOUNT, None)
    if account is None:
        account = Account()
        setattr(grammar, _ACCOUNT, account)
    return account
