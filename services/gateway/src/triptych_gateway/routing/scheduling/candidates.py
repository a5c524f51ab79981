"""Prompts, requests and instances as a choice sees them, and the decision that it leads to. Pure.

The gateway has no tokenizer, so it goes by the bytes of what the model reads, in the order of the
conversation. A media item ends a block, with its mm_hash. Blocks grow with their place, so that a long prompt
has few; the rest after the last whole block is part of none.

Python's own hash is used: it is keyed by process, and it is faster than a hash over several processes. A
collision costs a bad choice, and no more.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord

ITEM_BYTES = 2048  # that an item counts for: its tokens are not known here
MAX_PREFIX_BYTES = 1 << 20  # bytes beyond this make no difference
_SIZES = ((64, 128), (192, 512))  # (up to this block, bytes of each); then:
_LAST_SIZE = 4096


class PromptBlock(NamedTuple):
    """One piece of a prompt, hashed with all that comes before it."""

    chain: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Blocks of one prompt; `num_bytes` includes counted bytes outside of blocks."""

    blocks: tuple[PromptBlock, ...] = ()
    num_bytes: int = 0


def divide_prompt(parts: Iterable[bytes | MmHash], seed: Hashable) -> PromptBlocks:
    """Return the blocks of a prompt of these texts and items. 100 KB take 0.1 ms.

    Args:
        seed: further parts of the identity: model or LoRA adapter, namespace digest, the tenant's salt.
    """
    blocks: list[PromptBlock] = []
    chain, rest, num_bytes = hash(seed), b"", 0
    for part in parts:
        if isinstance(part, str):
            chain = hash((chain, rest, part))
            blocks.append(PromptBlock(chain, len(rest) + ITEM_BYTES))
            rest, num_bytes = b"", num_bytes + ITEM_BYTES
            if num_bytes >= MAX_PREFIX_BYTES:
                break
            continue
        part = part[: MAX_PREFIX_BYTES - num_bytes]
        num_bytes += len(part)
        rest += part
        start = 0
        while len(rest) - start >= (size := _size_of(len(blocks))):
            chain = hash((chain, rest[start : start + size]))
            blocks.append(PromptBlock(chain, size))
            start += size
        rest = rest[start:]
        if num_bytes >= MAX_PREFIX_BYTES:
            break
    return PromptBlocks(tuple(blocks), num_bytes)


def _size_of(block: int) -> int:
    for up_to, size in _SIZES:
        if block < up_to:
            return size
    return _LAST_SIZE


class ServingStage(StrEnum):
    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # its KV cache is kept for an instance that decodes
    DECODE = "decode"  # from a KV cache that another instance has made


@dataclass(frozen=True)
class RoutingRequest:
    """Facts about a request before an instance is chosen for it."""

    model: str  # or a LoRA adapter
    session: str = ""  # caller's name of the conversation, with the tenant's salt; "": none
    items: tuple[MmHash, ...] = ()
    num_prompt_bytes: int = 0  # of text
    read_prompt: Callable[[], PromptBlocks] = PromptBlocks
    items_at: Mapping[str, Set[MmHash]] = field(default_factory=dict)  # by store; empty: there is one alone

    @cached_property
    def prompt(self) -> PromptBlocks:
        """Blocks of the prompt, computed only if there is a choice."""
        return self.read_prompt()

    @property
    def is_prompt_read(self) -> bool:
        return "prompt" in self.__dict__


@dataclass(frozen=True, slots=True)
class Candidate:
    """Instance that could serve the request, with what this gateway knows of it."""

    record: InstanceRecord
    num_requests: int = 0  # in flight there, of all gateways
    num_prompt_bytes: int = 0  # of this gateway's requests there
    kv_usage: float | None = None  # 0 to 1; None: not announced
    is_suspect: bool = False
    picked_at: int = 0  # sequence number of this instance's last pick
    prefix_share: Callable[[PromptBlocks], float] = lambda prompt: 0.0
    holds_item: Callable[[MmHash], bool] = lambda mm_hash: False
    used_adapter: Callable[[str], bool] = lambda name: False


Filter = Callable[[Candidate], bool]
"""Function that returns False for a candidate to leave out, unless none would remain."""
Scorer = Callable[[RoutingRequest, Sequence[Candidate]], Sequence[float]]
"""Function that returns a score for each candidate in order, by one property: from 0 (worst) to 1 (best)."""


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """Candidate with `parts`: score times weight, by the scorer's name."""

    candidate: Candidate
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return round(sum(self.parts.values()), 6)  # equal, whatever the order of the sum was


Picker = Callable[[Sequence[ScoredCandidate]], ScoredCandidate]
"""Function that returns one of the scored candidates, of which there is at least one."""


ONLY, EQUAL, CHANCE = "only", "equal", "chance"  # reasons, besides the scorers' names
MAX_EXPLANATION = 400


@dataclass(frozen=True, slots=True)
class RoutingDecision:
    """Chosen instance, runner-up and reason of one choice."""

    stage: str
    chosen: ScoredCandidate
    runner_up: ScoredCandidate | None  # the best of the others that no filter left out
    reason: str  # scorer with the largest gain over the runner-up, or one of the above
    prefix_share: float | None = None  # share of the prompt sent before; None: not computed

    @property
    def record(self) -> InstanceRecord:
        return self.chosen.candidate.record

    @property
    def explanation(self) -> str:
        """Explanation for people: `pd-0 2.5 (prefix 1.5, queue 1); pd-1 1 (queue 1)`."""
        shown = [_shown(each) for each in (self.chosen, self.runner_up) if each is not None]
        return "; ".join(shown)[:MAX_EXPLANATION]


def _shown(scored: ScoredCandidate) -> str:
    parts = ", ".join(f"{name} {value:.3g}" for name, value in scored.parts.items() if value)
    total = f"{scored.candidate.record.instance} {scored.total:.3g}"
    return f"{total} ({parts})" if parts else total


def reason_for(chosen: ScoredCandidate, runner_up: ScoredCandidate | None) -> str:
    """Return the scorer that decided, or another reason."""
    if runner_up is None:
        return ONLY
    if chosen.total == runner_up.total:
        return EQUAL
    if chosen.total < runner_up.total:
        return CHANCE
    gains = {name: value - runner_up.parts[name] for name, value in chosen.parts.items()}
    return max(gains, key=lambda name: gains[name])
