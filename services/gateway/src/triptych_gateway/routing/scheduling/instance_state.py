"""InstanceState: this gateway's facts about one instance: its requests there, load, and prompts sent.

The load is shared: an instance announces with each heartbeat how many requests it has, of all gateways. The
most that this gateway had there since the previous heartbeat is subtracted; the rest is other gateways' and
counts until the next heartbeat. This gateway's own requests count exactly.
"""

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.routing.scheduling.candidates import Candidate, RoutingRequest
from triptych_gateway.routing.scheduling.prefix_memory import PrefixMemory

MAX_ITEMS = 4096  # items that an instance is assumed to hold, in its caches
MAX_ADAPTERS_IN_USE = 4  # adapters in use: vLLM keeps few of the loaded ones where they compute
LOAD_TTL_S = 5.0  # of an announced load: Redis may be away

Key = TypeVar("Key", bound=Hashable)


class _RecentKeys(Generic[Key]):
    def __init__(self, max_keys: int) -> None:
        self._keys: LRUCache[Key, None] = LRUCache(max_keys)

    def add(self, key: Key) -> None:
        self._keys[key] = None

    def drop(self, key: Key) -> None:
        self._keys.pop(key, None)

    def holds(self, key: Key) -> bool:
        return key in self._keys


class _New(NamedTuple):
    """Blocks and items that one request sent to an instance for the first time."""

    chains: tuple[int, ...]  # of blocks of its prompt
    items: tuple[MmHash, ...]


class _Sent:
    """Blocks and items sent to one incarnation of an instance."""

    def __init__(self) -> None:
        self.prefixes = PrefixMemory()
        self.items: _RecentKeys[MmHash] = _RecentKeys(MAX_ITEMS)
        self.adapters: _RecentKeys[str] = _RecentKeys(MAX_ADAPTERS_IN_USE)


class InstanceState:
    """State of one instance; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self.num_in_flight = 0  # of this gateway
        self.picked_at = 0
        self.suspect_until = float("-inf")
        self._num_prompt_bytes = 0
        self._num_peak = 0  # most in flight since the last announcement
        self._boot_id = ""
        self._beat = 0
        self._announced_at = float("-inf")
        self._num_others = 0
        self._sent = _Sent()
        self._new: dict[int, _New] = {}  # by the requests in flight, as objects

    def observe(self, record: InstanceRecord, now: float) -> None:
        """Record the registry's record of the instance."""
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

    def begin_request(self, request: RoutingRequest | None) -> None:
        self.num_in_flight += 1
        self._num_peak = max(self._num_peak, self.num_in_flight)
        if request is None:
            return
        self._num_prompt_bytes += request.num_prompt_bytes
        items = tuple(each for each in request.items if not self._sent.items.holds(each))
        for mm_hash in request.items:
            self._sent.items.add(mm_hash)
        self._sent.adapters.add(request.model)
        chains = self._sent.prefixes.remember(request.prompt.blocks) if request.is_prompt_read else ()
        self._new[id(request)] = _New(chains, items)

    def end_request(self, request: RoutingRequest | None, *, is_computed: bool = True) -> None:
        """End a request; `is_computed` False means no answer, so that the instance does not hold it."""
        self.num_in_flight = max(0, self.num_in_flight - 1)
        if request is None:
            return
        self._num_prompt_bytes = max(0, self._num_prompt_bytes - request.num_prompt_bytes)
        new = self._new.pop(id(request), None)
        if new is not None and not is_computed:
            self._sent.prefixes.forget(new.chains)
            for mm_hash in new.items:
                self._sent.items.drop(mm_hash)

    def num_requests(self, now: float) -> int:
        """Return the requests in flight there, of all gateways as far as known."""
        return self.num_in_flight + (self._num_others if self._is_load_known(now) else 0)

    def as_candidate(self, record: InstanceRecord, now: float) -> Candidate:
        """Return the candidate for one choice."""
        load = record.load if self._is_load_known(now) else None
        return Candidate(
            record,
            num_requests=self.num_requests(now),
            num_prompt_bytes=self._num_prompt_bytes,
            kv_usage=None if load is None else load.kv_usage,
            is_suspect=self.suspect_until > now,
            picked_at=self.picked_at,
            prefix_share=self._sent.prefixes.share_of,
            holds_item=self._sent.items.holds,
            used_adapter=self._sent.adapters.holds,
        )

    def _is_load_known(self, now: float) -> bool:
        return now - self._announced_at < LOAD_TTL_S
