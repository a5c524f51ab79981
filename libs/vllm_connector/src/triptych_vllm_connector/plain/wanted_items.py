"""Answers vLLM's own scheduler about items that can be loaded. Pure.

    None --try_pin--> pinned --vLLM allocates it--> a load of this step, whose pins are the workers' to end
                         `--its requests are done with it--> unpinned

An item is asked for when vLLM is about to schedule it and its encoder cache does not have it. Without a pin
the instance encodes the item, as usual. An item that came without its media (metadata only) cannot be
encoded: its request waits for a pin in front of the scheduler, and fails when none comes in time.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.plain.store_pins import BoundedPins, StorePin

log = get_logger(__name__)

ASK_AGAIN_S = 0.05  # the scheduler asks at each step; the store need not
MAX_MISSES = 1000


class WantedItems:
    """Items of scheduled requests by vLLM's identifier, for EngineCore's thread."""

    def __init__(
        self,
        pins: BoundedPins,
        hash_of: Callable[[str], str],
        can_encode: Callable[[Any], bool],
        item_timeout_s: float,
        width: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            hash_of: the item's name at the store.
            can_encode: whether this instance could encode a feature.
            width: of what the model takes; DeepStack's outputs are several times as wide.
        """
        self._source = pins
        self._hash_of = hash_of
        self._can_encode = can_encode
        self._item_timeout_s = item_timeout_s
        self._width = width
        self._now = now
        self._pins: dict[str, StorePin] = {}
        self._missed: dict[str, float] = {}  # when to ask again
        self._num_rows: dict[str, int] = {}  # as the request has it that vLLM schedules now
        self._deadlines: dict[str, float] = {}  # by engine request id
        self._unavailable: set[str] = set()  # engine request ids
        self._loads: dict[str, StorePin] = {}
        self._of_request: dict[str, tuple[str, ...]] = {}  # items that the next step may need

    def admit_request(self, request: Any, num_computed_tokens: int) -> bool:
        """Check a request that vLLM is about to schedule; False if an item is missing that cannot be encoded
        here."""
        needed = [
            feature
            for feature in request.mm_features
            if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
        ]
        if not needed:
            return True
        self._of_request[request.request_id] = tuple(feature.identifier for feature in needed)
        is_missing = False
        for feature in needed:
            self._num_rows[feature.identifier] = feature.mm_position.get_num_embeds()
            self._drop_stale(feature.identifier)
            is_missing |= not self._can_encode(feature) and not self.has_item(feature.identifier)
        if not is_missing:
            self._deadlines.pop(request.request_id, None)
            return True
        deadline = self._deadlines.setdefault(request.request_id, self._now() + self._item_timeout_s)
        if self._now() >= deadline and request.request_id not in self._unavailable:
            log.warning("item not in the store, request failed", engine_request_id=request.request_id)
            self._unavailable.add(request.request_id)
        return False

    def has_item(self, identifier: str) -> bool:
        """True if vLLM shall load the item, rather than encode it."""
        if identifier in self._pins:
            return True
        now = self._now()
        if now < self._missed.get(identifier, now):
            return False
        pin = self._source.try_pin(self._hash_of(identifier))
        if pin is not None and not self._fits(identifier, pin):
            log.warning("entry has other rows than the item", identifier=identifier)
            self._source.unpin(pin)
            pin = None
        if pin is None:
            self._note_miss(identifier, now)
            return False
        self._missed.pop(identifier, None)
        self._pins[identifier] = pin
        return True

    def on_allocated(self, identifier: str) -> None:
        """Load the item, now that vLLM has allocated cache space; without a pin it is encoded."""
        self._missed.pop(identifier, None)  # the next one that needs it comes much later
        if identifier in self._loads:  # evicted and allocated again, in one pass
            self._unpin(identifier)
            return
        pin = self._pins.pop(identifier, None)
        if pin is not None:
            self._loads[identifier] = pin

    def on_computed(self, identifier: str) -> None:
        """Unpin an item that a request is done with; another request asks anew."""
        self._unpin(identifier)

    def on_finished(self, request: Any) -> None:
        self._deadlines.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        self._of_request.pop(request.request_id, None)
        for feature in request.mm_features:
            self._num_rows.pop(feature.identifier, None)
            self._unpin(feature.identifier)

    def take_unavailable(self) -> set[str]:
        """Engine request ids whose items did not come in time."""
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def take_step(self, scheduled: Iterable[str]) -> tuple[dict[str, StorePin], tuple[str, ...]]:
        """Loads of a step with these engine request ids, and the items that they need."""
        loads, self._loads = self._loads, {}
        of_request, self._of_request = self._of_request, {}
        needed = dict.fromkeys(
            identifier for request_id in scheduled for identifier in of_request.get(request_id, ())
        )
        return loads, tuple(needed)

    def _fits(self, identifier: str, pin: StorePin) -> bool:
        """True if the entry's shape fits; another width means another model with the same `namespace`."""
        num_rows, width = pin.descriptor.spec.shape
        return num_rows == self._num_rows.get(identifier, num_rows) and not width % self._width

    def _drop_stale(self, identifier: str) -> None:
        pin = self._pins.get(identifier)
        if pin is not None and not self._source.is_current(pin):
            self._unpin(identifier)

    def _unpin(self, identifier: str) -> None:
        pin = self._pins.pop(identifier, None)
        if pin is not None:
            self._source.unpin(pin)

    def _note_miss(self, identifier: str, now: float) -> None:
        if len(self._missed) >= MAX_MISSES:
            self._missed = {each: until for each, until in self._missed.items() if until > now}
        self._missed[identifier] = now + ASK_AGAIN_S
