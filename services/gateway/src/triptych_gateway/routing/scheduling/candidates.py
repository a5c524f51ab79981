"""Request and instances as filters, scorers and pickers see them."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.scheduling.prompt_blocks import PromptBlocks


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
    picked_at: int = 0  # the how many-th choice, of all instances
    prefix_share: Callable[[PromptBlocks], float] = lambda prompt: 0.0
    holds_item: Callable[[MmHash], bool] = lambda mm_hash: False
    used_adapter: Callable[[str], bool] = lambda name: False


class Filter(Protocol):
    """Filter that leaves candidates out, unless none would remain."""

    def keeps(self, candidate: Candidate) -> bool: ...


class Scorer(Protocol):
    """Scorer by one property of instances."""

    def score(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Sequence[float]:
        """Return a score for each candidate in order: from 0 (worst) to 1 (best)."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredCandidate:
    """Candidate with `parts`: score times weight, by the scorer's name."""

    candidate: Candidate
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        return round(sum(self.parts.values()), 6)  # equal, whatever the order of the sum was


class Picker(Protocol):
    """Picker of one scored candidate."""

    def pick(self, scored: Sequence[ScoredCandidate]) -> ScoredCandidate:
        """Return one of `scored`, which is not empty."""
        ...
