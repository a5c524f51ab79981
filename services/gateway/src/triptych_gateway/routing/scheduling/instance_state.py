"""InstanceState: this gateway's facts about one instance: its requests there, load, and prompts sent.

The load is shared: an instance announces with each heartbeat how many requests it has, of all gateways. The
most that this gateway had there since the previous heartbeat is subtracted; the rest is other gateways' and
counts until the next heartbeat. This gateway's own requests count exactly.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.scheduling.candidates import (
    Candidate,
    PromptBlock,
    PromptBlocks,
    RoutingRequest,
)

BYTES_PER_TOKEN = 4  # of a text, about
DEFAULT_BYTES = 4 << 20  # of prompts, without an announced capacity
MAX_BLOCKS = 65_536  # whatever it holds: about 10 MB of this gateway


class PrefixMemory:
    """Memory of prompts sent to one instance.

    As in vLLM, the end of a prompt is dropped before its beginning. So this approximates the content of its
    prefix cache.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()  # of blocks by chain; the latest used last
        self._num_bytes = 0
        self._max_blocks = max_blocks
        self._max_bytes = DEFAULT_BYTES

    def __len__(self) -> int:
        return len(self._sizes)

    def set_capacity(self, kv_cache_tokens: int | None) -> None:
        self._max_bytes = DEFAULT_BYTES if kv_cache_tokens is None else kv_cache_tokens * BYTES_PER_TOKEN
        self._trim()

    def remember(self, blocks: Sequence[PromptBlock]) -> tuple[int, ...]:
        """Remember a prompt that goes to the instance; return the chains that are new."""
        new = tuple(block.chain for block in blocks if block.chain not in self._sizes)
        for block in reversed(blocks):
            if block.chain in self._sizes:
                self._sizes.move_to_end(block.chain)
            else:
                self._sizes[block.chain] = block.num_bytes
                self._num_bytes += block.num_bytes
        self._trim()
        return new

    def forget(self, chains: Iterable[int]) -> None:
        """Forget chains that were never computed."""
        for chain in chains:
            self._num_bytes -= self._sizes.pop(chain, 0)

    def share_of(self, prompt: PromptBlocks) -> float:
        """Return the share of the prompt, from the beginning, that was sent before: 0 to 1."""
        known = 0
        for block in prompt.blocks:
            if block.chain not in self._sizes:
                break
            known += block.num_bytes
        return known / prompt.num_bytes if known else 0.0

    def clear(self) -> None:
        """Forget everything, since the instance was restarted."""
        self._sizes.clear()
        self._num_bytes = 0

    def _trim(self) -> None:
        while self._sizes and (self._num_bytes > self._max_bytes or len(self._sizes) > self._max_blocks):
            _, num_bytes = self._sizes.popitem(last=False)
            self._num_bytes -= num_bytes


MIN_BUSY = 4
MIN_ENDS = 3  # fewer are no measure
FADE = 0.95
FIRST_REQUEST_S = 1.0  # of a request, until one has ended


@dataclass(slots=True)
class _Mean:
    """Mean over ended requests, the latest of which count most."""

    num: int = 0
    seconds: float = 0.0
    num_requests: float = 0.0
    num_tokens: float = 0.0

    def add(self, seconds: float, num_tokens: float) -> None:
        self.num += 1
        self.seconds = FADE * self.seconds + seconds
        self.num_requests = FADE * self.num_requests + 1.0
        self.num_tokens = FADE * self.num_tokens + num_tokens


@dataclass(slots=True)
class ServingRate:
    """Rate of one instance; `now` is in monotonic seconds.

    Measured at the ends of requests. While `MIN_BUSY` requests or more are in flight at the instance, it does
    not wait for requests: the time since the end before is what it took. Until `MIN_ENDS` such times are
    measured, a request's own time counts, which is too long where several are computed at once.
    """

    _busy: _Mean = field(default_factory=_Mean)
    _single: _Mean = field(default_factory=_Mean)
    _ended_at: float | None = None  # the last request, while the instance was busy

    def end_request(self, seconds: float, num_tokens: float, num_in_flight: int, now: float) -> None:
        if num_in_flight < MIN_BUSY:
            self._single.add(seconds, num_tokens)
            self._ended_at = None
            return
        if self._ended_at is not None:
            self._busy.add(now - self._ended_at, num_tokens)
        self._ended_at = now

    def request_s(self, num_requests: float) -> float:
        mean = self._mean
        return num_requests * (mean.seconds / mean.num_requests if mean.num else FIRST_REQUEST_S)

    def prompt_s(self, num_tokens: float, num_requests: float) -> float:
        """Return the seconds that it takes for prompts of `num_tokens` together."""
        mean = self._mean
        if not mean.num_tokens:
            return self.request_s(num_requests)
        return num_tokens * mean.seconds / mean.num_tokens

    @property
    def _mean(self) -> _Mean:
        return self._busy if self._busy.num >= MIN_ENDS else self._single


MAX_ITEMS = 4096  # items that an instance is assumed to hold, in its caches
MAX_ADAPTERS_IN_USE = 4  # adapters in use: vLLM keeps few of the loaded ones where they compute
ITEM_TOKENS = 1024  # of an item; beside BYTES_PER_TOKEN only the proportion matters
LOAD_TTL_S = 5.0  # of an announced load: Redis may be away


class _New(NamedTuple):
    """Blocks and items that one request sent to an instance for the first time."""

    chains: tuple[int, ...]  # of blocks of its prompt
    items: tuple[MmHash, ...]
    begun_at: float  # monotonic seconds


class Waiting(NamedTuple):
    prefill_s: float
    decode_s: float


class _Sent:
    def __init__(self) -> None:
        self.prefixes = PrefixMemory()
        self.items: LRUCache[MmHash, None] = LRUCache(MAX_ITEMS)
        self.adapters: LRUCache[str, None] = LRUCache(MAX_ADAPTERS_IN_USE)


class InstanceState:
    """State of one instance; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self.num_in_flight = 0  # of this gateway
        self.picked_at = 0
        self.suspect_until = float("-inf")
        self._num_prompt_bytes = 0
        self._num_prompt_tokens = 0.0  # estimated, with those of items
        self._rate = ServingRate()
        self._num_peak = 0  # most in flight since the last announcement
        self._boot_id = ""
        self._beat = 0
        self._announced_at = float("-inf")
        self._num_others = 0
        self._sent = _Sent()
        self._new: dict[int, _New] = {}  # by the requests in flight, as objects

    def observe(self, record: InstanceRecord, now: float) -> None:
        if record.boot_id != self._boot_id:
            self._boot_id, self._beat = record.boot_id, 0
            self._announced_at = float("-inf")
            self._sent = _Sent()
            self._sent.prefixes.set_capacity(record.kv_cache_tokens)
        load = record.load
        if load is not None and load.num_beats > self._beat:
            self._beat, self._announced_at = load.num_beats, now
            self._num_others = max(0, load.num_running + load.num_waiting - self._num_peak)
            self._num_peak = self.num_in_flight

    def begin_request(self, request: RoutingRequest | None, now: float = 0.0) -> None:
        self.num_in_flight += 1
        self._num_peak = max(self._num_peak, self.num_in_flight)
        if request is None:
            return
        self._num_prompt_bytes += request.num_prompt_bytes
        self._num_prompt_tokens += _num_tokens(request)
        items = tuple(each for each in request.items if each not in self._sent.items)
        for mm_hash in request.items:
            self._sent.items[mm_hash] = None
        self._sent.adapters[request.model] = None
        chains = self._sent.prefixes.remember(request.prompt.blocks) if request.is_prompt_read else ()
        self._new[id(request)] = _New(chains, items, now)

    def end_request(
        self, request: RoutingRequest | None, now: float = 0.0, *, is_computed: bool = True
    ) -> None:
        """End a request; `is_computed` False means no answer, so that the instance does not hold it."""
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if request is None:
            return
        self._num_prompt_bytes = max(0, self._num_prompt_bytes - request.num_prompt_bytes)
        self._num_prompt_tokens = max(0.0, self._num_prompt_tokens - _num_tokens(request))
        new = self._new.pop(id(request), None)
        if new is not None and is_computed:
            seconds, num_tokens = now - new.begun_at, _num_tokens(request)
            self._rate.end_request(seconds, num_tokens, self.num_in_flight + 1, now)
        elif new is not None:
            self._sent.prefixes.forget(new.chains)
            for mm_hash in new.items:
                self._sent.items.pop(mm_hash, None)

    def num_requests(self, now: float) -> int:
        """Return the requests in flight there, of all gateways as far as known."""
        return self.num_in_flight + (self._num_others if self._is_load_known(now) else 0)

    def waiting(self, record: InstanceRecord, num_without_items: int, now: float) -> Waiting:
        """Return this gateway's work that waits there for its turn, by the load that it announces.

        `num_without_items` requests there wait for encoders instead; the instance counts them as waiting.
        """
        load = record.load if self._is_load_known(now) else None
        num_due = self.num_in_flight - num_without_items
        if load is None or num_due <= 0:
            return Waiting(0.0, 0.0)
        num_waiting = max(0, load.num_waiting - num_without_items)
        share = num_waiting / max(1, load.num_running + num_waiting)
        num_tokens = self._num_prompt_tokens * num_due / self.num_in_flight
        num_own = share * num_due
        return Waiting(self._rate.prompt_s(share * num_tokens, num_own), self._rate.request_s(num_own))

    def as_candidate(self, record: InstanceRecord, now: float) -> Candidate:
        load = record.load if self._is_load_known(now) else None
        return Candidate(
            record,
            num_requests=self.num_requests(now),
            num_prompt_bytes=self._num_prompt_bytes,
            kv_usage=None if load is None else load.kv_usage,
            is_suspect=self.suspect_until > now,
            picked_at=self.picked_at,
            prefix_share=self._sent.prefixes.share_of,
            holds_item=self._sent.items.__contains__,
            used_adapter=self._sent.adapters.__contains__,
        )

    def _is_load_known(self, now: float) -> bool:
        return now - self._announced_at < LOAD_TTL_S


def _num_tokens(request: RoutingRequest) -> float:
    return request.num_prompt_bytes / BYTES_PER_TOKEN + ITEM_TOKENS * len(request.items)
