"""Partial requests: requests that began before all of their items were here, and their limit. Pure.

    may_begin --yes--> begin --prompt computed, preempted, or ended--> end

What they hold while they wait, others lack: blocks of the KV cache, and one of the requests that may run at
once (a seat). So all partial requests that still miss an item have a share of both. A request that is the
only one of them may be larger than the share of blocks, since it gives way when others need them.

A request counts with the blocks of its whole prompt, from its beginning on: it will hold them before its last
item is computed.
"""

from collections.abc import Callable, Iterable
from typing import Any


class PartialRequests:
    """Partial requests, together limited to `max_blocks` and `max_seats` while `is_incomplete(id)`."""

    def __init__(self, max_blocks: int, max_seats: int, is_incomplete: Callable[[str], bool]) -> None:
        self._max_blocks = max_blocks
        self._max_seats = max_seats
        self._is_incomplete = is_incomplete
        self._num_blocks: dict[str, int] = {}  # by engine request id, in the order in which they began

    def __len__(self) -> int:
        return len(self._num_blocks)

    def __contains__(self, engine_request_id: str) -> bool:
        return engine_request_id in self._num_blocks

    def ids(self) -> list[str]:
        """Engine request ids, in the order they began."""
        return list(self._num_blocks)

    def may_begin(self, num_blocks: int, num_free_blocks: int) -> bool:
        """True if one more request, whose prompt takes `num_blocks`, may begin."""
        held = [self._num_blocks[each] for each in self._num_blocks if self._is_incomplete(each)]
        if len(held) >= self._max_seats or num_blocks > num_free_blocks:
            return False
        return not held or sum(held) + num_blocks <= self._max_blocks

    def begin(self, engine_request_id: str, num_blocks: int) -> None:
        """Add a request that runs without all of its items."""
        self._num_blocks[engine_request_id] = num_blocks

    def end(self, engine_request_id: str) -> bool:
        """Remove a request that is complete or gone; False if it was not partial."""
        return self._num_blocks.pop(engine_request_id, None) is not None


def newest(requests: Iterable[Any], *, by_priority: bool) -> Any | None:
    """The request that gives way first: the last to arrive, of the lowest priority."""
    return max(
        requests,
        key=lambda each: (each.priority if by_priority else 0, each.arrival_time),
        default=None,
    )
