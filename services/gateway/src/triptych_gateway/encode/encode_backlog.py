"""EncodeBacklog: the encodes that this gateway has ordered, and how long a new one would wait. Pure.

work    an item's seconds of an encoder: the median of the latest encodes of its size, or of the nearest size
        that is known. Nothing is predicted where none is, as at first, or only sizes `MAX_SCALE` times
        smaller: processors shrink large images, so pixels predict their time badly
pace    seconds that pass for one second of work, times the encoders: measured while at least `MIN_BUSY` items
        of each encoder are outstanding, `FIRST_PACE` before. It holds what preprocessing, a full store, other
        programs and the jobs of other gateways cost
ahead   the work of the flow itself, as much of each other flow of its class as it gets itself, and
        of higher classes `MAX_PASSED` times as much (`domain.fair_queue`); at most what is there
"""

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cachetools import LRUCache

from triptych_common.domain.fair_queue import LEVELS, MAX_PASSED, FairKey
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ImageProperties, Modality

MIN_BUSY = 4  # items outstanding for each encoder, with which encoders do not wait for any
MAX_SCALE = 4.0  # of pixels, from a size that is known to a larger one
MIN_KNOWN = 5  # encodes of a size; fewer are no measure: the first ones take longer, or seem to take nothing
MIN_LONG, LONG_S = 3, 1.5  # fewer that took so many seconds together are: waiting for more delays refusals
NUM_KEPT = 9  # the latest ones
MAX_AGE_S = 600.0  # of a pace
FIRST_ENCODE_S = 1.0  # of an item in work that waits, until its time can be predicted
FIRST_PACE = 1.5  # until it is measured: what encoders prepare and hand over takes its part, as prompts do
MIN_PACES = 3  # observations; fewer are no measure
PACE_FADE = 0.9
MIN_PACE, MAX_PACE = 0.5, 20.0
MAX_NAMESPACES = 64
MAX_ENDED = 1024


@dataclass(frozen=True, slots=True)
class Wait:
    """Predicted wait of new items, in seconds."""

    ahead_s: float  # until the first of the items is begun
    own_s: float  # for the items

    @property
    def total_s(self) -> float:
        return self.ahead_s + self.own_s


class EncodeWork(NamedTuple):
    """Kind of work: items of one kind take about as long to encode."""

    modality: Modality
    size: int  # of an image: half octaves of pixels; 0 where no header tells the size

    @classmethod
    def of(cls, modality: Modality, image: ImageProperties | None) -> "EncodeWork":
        return cls(modality, 0 if image is None else round(2 * math.log2(image.num_pixels)))


@dataclass(slots=True)
class _Namespace:
    seconds: defaultdict[EncodeWork, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=NUM_KEPT))
    )
    fair_keys: defaultdict[FairKey, Counter[EncodeWork]] = field(default_factory=lambda: defaultdict(Counter))
    num_items: int = 0  # outstanding
    was_busy: bool = False  # when the last encode ended
    ended_at: float = float("-inf")  # then
    passed_s: float = 0.0  # while encoders were busy; faded
    worked_s: float = 0.0  # work done meanwhile; likewise
    num_paces: int = 0

    def pace(self, now: float) -> float:
        if self.num_paces < MIN_PACES or now - self.ended_at > MAX_AGE_S or self.worked_s <= 0:
            return FIRST_PACE
        return min(max(self.passed_s / self.worked_s, MIN_PACE), MAX_PACE)

    def seconds_of(self, work: EncodeWork) -> float | None:
        """Return what one encoder takes: from another size in proportion to the pixels; None: not known."""
        known = [
            each
            for each, seconds in self.seconds.items()
            if each.modality is work.modality and _is_measure(seconds)
        ]
        if not known:
            return None
        nearest = min(known, key=lambda each: abs(each.size - work.size))
        scale = math.pow(2.0, (work.size - nearest.size) / 2)
        return None if scale > MAX_SCALE else statistics.median(self.seconds[nearest]) * scale


def _is_measure(seconds: Sequence[float]) -> bool:
    num = len(seconds)
    return num >= MIN_KNOWN or (num >= MIN_LONG and sum(seconds) >= LONG_S)


class EncodeBacklog:
    """Outstanding items, each from its admission or order to its end; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._items: dict[MmHash, tuple[str, FairKey, EncodeWork]] = {}
        # An encoder's report may come behind the end of the request that ordered the item.
        self._ended: LRUCache[MmHash, tuple[str, EncodeWork]] = LRUCache(MAX_ENDED)
        self._namespaces: LRUCache[str, _Namespace] = LRUCache(MAX_NAMESPACES)

    def __contains__(self, mm_hash: MmHash) -> bool:
        return mm_hash in self._items

    def __len__(self) -> int:
        return len(self._items)

    def begin_item(self, mm_hash: MmHash, namespace_digest: str, fair_key: FairKey, work: EncodeWork) -> None:
        """Begin an item that is to be encoded. Idempotent."""
        if mm_hash in self._items:
            return
        self._items[mm_hash] = namespace_digest, fair_key, work
        known = self._namespace(namespace_digest)
        known.num_items += 1
        known.fair_keys[fair_key][work] += 1

    def end_item(self, mm_hash: MmHash) -> bool:
        """End an item that needs no encode any more; return whether it was under way."""
        if (ended := self._items.pop(mm_hash, None)) is None:
            return False
        digest, fair_key, work = ended
        known = self._namespace(digest)
        known.num_items = max(0, known.num_items - 1)
        known.fair_keys[fair_key][work] -= 1
        if known.fair_keys[fair_key][work] <= 0:
            del known.fair_keys[fair_key][work]
        if not known.fair_keys[fair_key]:
            del known.fair_keys[fair_key]
        self._ended[mm_hash] = digest, work
        return True

    def num_items(self, namespace_digest: str, fair_key: FairKey) -> int:
        return sum(self._namespace(namespace_digest).fair_keys.get(fair_key, {}).values())

    def num_by_flow(self, namespace_digest: str) -> Counter[str]:
        counts = Counter[str]()
        for fair_key in self._namespace(namespace_digest).fair_keys:
            counts[fair_key.flow] += self.num_items(namespace_digest, fair_key)
        return counts

    def waiting_s(self, namespace_digest: str, is_counted: Callable[[MmHash], bool], now: float) -> float:
        """Return the seconds that one encoder takes for the outstanding items that `is_counted` accepts.

        An item whose time is unknown takes `FIRST_ENCODE_S`, so that work for a first encoder is not 0.
        """
        works = Counter(
            work
            for mm_hash, (digest, _, work) in self._items.items()
            if digest == namespace_digest and is_counted(mm_hash)
        )
        known = self._namespace(namespace_digest)
        own_s = sum(
            num * (FIRST_ENCODE_S if (seconds := known.seconds_of(work)) is None else seconds)
            for work, num in works.items()
        )
        return own_s * known.pace(now)

    def namespace_of(self, mm_hash: MmHash) -> str | None:
        """Return the namespace of an item that is outstanding, or was a moment ago."""
        if mm_hash in self._items:
            return self._items[mm_hash][0]
        return self._ended[mm_hash][0] if mm_hash in self._ended else None

    def complete_item(self, mm_hash: MmHash, encode_s: float, num_encoders: int, now: float) -> None:
        """Record that an encoder made the item in `encode_s`, without its wait there."""
        num_encoders = max(num_encoders, 1)
        self.end_item(mm_hash)
        if (ended := self._ended.pop(mm_hash, None)) is None:
            return
        digest, work = ended
        known = self._namespace(digest)
        is_busy = known.num_items + 1 >= MIN_BUSY * num_encoders
        self.observe(digest, work, encode_s)
        if is_busy and known.was_busy:
            known.passed_s = PACE_FADE * known.passed_s + (now - known.ended_at) * num_encoders
            known.worked_s = PACE_FADE * known.worked_s + encode_s
            known.num_paces += 1
        known.was_busy, known.ended_at = is_busy, now

    def observe(self, namespace_digest: str, work: EncodeWork, encode_s: float) -> None:
        self._namespace(namespace_digest).seconds[work].append(encode_s)

    def predict(
        self,
        namespace_digest: str,
        fair_key: FairKey,
        works: Iterable[EncodeWork],
        num_encoders: int,
        now: float,
    ) -> Wait | None:
        """Predict how long new items of `fair_key` would wait; None if their encode time is unknown."""
        known = self._namespace(namespace_digest)
        own_s = 0.0
        for work in works:
            if (seconds := known.seconds_of(work)) is None:
                return None
            own_s += seconds
        ahead_s = _ordered_s(known, fair_key)
        turns_s, level, higher_s = ahead_s + own_s, LEVELS[fair_key.encode_class], 0.0
        for other in known.fair_keys:
            if other == fair_key or LEVELS[other.encode_class] > level:
                continue
            other_s = _ordered_s(known, other)
            if LEVELS[other.encode_class] == level:
                ahead_s += min(other_s, turns_s)
            else:
                higher_s += other_s
        ahead_s += min(higher_s, MAX_PASSED * turns_s)
        rate = known.pace(now) / max(num_encoders, 1)
        return Wait(ahead_s * rate, own_s * rate)

    def _namespace(self, namespace_digest: str) -> _Namespace:
        known: _Namespace | None = self._namespaces.get(namespace_digest)
        if known is None:
            known = self._namespaces[namespace_digest] = _Namespace()
        return known


def _ordered_s(known: _Namespace, fair_key: FairKey) -> float:
    """Return the seconds that the fair key has ordered; unknown work counts as 0."""
    return sum(
        num_items * (known.seconds_of(work) or 0.0)
        for work, num_items in known.fair_keys.get(fair_key, {}).items()
    )
