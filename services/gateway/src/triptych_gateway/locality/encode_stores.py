"""EncodeStores: the stores whose encoders take a namespace's jobs, and the choice of one for a job.

Near encoders, those that write to the store of the chosen language model, save the transfer. They get the
job while it is predicted to wait for them no longer than it waits elsewhere and travels from there. The
prediction can be wrong, so other encoders may take a job that has waited for as long as its transfer would
take: it has then cost no more than twice the better choice.

A job waits for those before it on the stream: all gateways' jobs, as they were last read with a claim, and
what this gateway has published or seen end since. The encoders of a store work on them at once, each at the
speed that it announces in the registry.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from cachetools import LRUCache

from triptych_common.coordination import Backlogs, store_of
from triptych_common.domain.fair_queue import slot_cost
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, ImageProperties, InstanceRecord, Modality
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.routing.router import ENCODING_ROLES
from triptych_gateway.settings import TransferSettings

LEAST_SPARE_S = 0.05  # least time for which a job is left to the encoders it is published for
MOST_SPARE_S = 10.0  # most time: other encoders cannot take jobs that wait behind it on the stream
FIRST_ROWS = 1280.0  # of an item of cost 1, which is a megapixel: 28 x 28 pixels to a row
FIRST_ROW_BYTES = 8192.0  # 4096 columns of two bytes
WEIGHT = 0.2  # of the latest observation
MAX_ASKED = 8192  # items that were asked about, and whose sizes are to come
FIRST_ROW_S = 2e-4  # an encoder's, until one of the namespace announces its speed
READ_HOLDS_S = 5.0  # a reading of the streams counts for this long
MAX_NAMESPACES = 64
TransferSeconds = Callable[[str, str, int], float | None]
"""Seconds of a transfer of some bytes from one store to another; None if it was not measured."""


class PlaceReason(StrEnum):
    NEAR = "near"  # they keep up
    LESS_BUSY = "less_busy"  # they are done sooner, with the transfer
    ONLY_PLACE = "only_place"  # no other store has encoders of the namespace
    NEAR_FAILED = "near_failed"  # asked for: the item could not be brought from another store
    ANYWHERE = "anywhere"  # no encoder is near, or it is not known where the item is needed
    NO_ENCODER = "no_encoder"  # none is registered: it waits for one


@dataclass(frozen=True, slots=True)
class JobPlace:
    store: str
    reason: PlaceReason
    spare_after_ms: int  # encoders of other stores may take the job then
    transfer_s: float = 0.0  # predicted seconds of the item's transfer to where it is needed


def choose_place(
    waits_s: Mapping[str, float],
    target: str | None,
    transfer_s: Callable[[str], float],
    *,
    only_near: str | None = None,
) -> JobPlace:
    """Choose the place of a job whose item is needed at `target`.

    Args:
        waits_s: by store with encoders, seconds until a job that is published now is begun.
        target: None: not known.
        transfer_s: the seconds that the item takes from a store to `target`.
        only_near: the store whose encoders shall have it, if it has any; others only after `MOST_SPARE_S`.
    """

    def travel_s(store: str) -> float:
        return 0.0 if target in (None, store) else transfer_s(store)

    if only_near is not None and only_near in waits_s:
        return JobPlace(only_near, PlaceReason.NEAR_FAILED, _spare_ms(MOST_SPARE_S), travel_s(only_near))
    best = min(waits_s, key=lambda each: (waits_s[each] + travel_s(each), each != target, each))
    if len(waits_s) == 1:
        return JobPlace(best, PlaceReason.ONLY_PLACE, _spare_ms(0.0), travel_s(best))
    if target not in waits_s:
        return JobPlace(best, PlaceReason.ANYWHERE, _spare_ms(0.0), travel_s(best))
    if best != target:
        return JobPlace(best, PlaceReason.LESS_BUSY, _spare_ms(0.0), travel_s(best))
    return JobPlace(
        best, PlaceReason.NEAR, _spare_ms(min(transfer_s(each) for each in waits_s if each != target))
    )


def _spare_ms(seconds: float) -> int:
    return int(min(max(seconds, LEAST_SPARE_S), MOST_SPARE_S) * 1000)


class RowEstimates:
    """Estimates of one gateway over all namespaces: small errors change few choices."""

    def __init__(self) -> None:
        self._rows: dict[Modality, float] = {}  # of an item of cost 1
        self._row_bytes = FIRST_ROW_BYTES
        self._asked: LRUCache[MmHash, float] = LRUCache(MAX_ASKED)  # cost
        self.mean_rows = FIRST_ROWS  # of an item

    def rows_of(self, mm_hash: MmHash, modality: Modality, image: ImageProperties | None) -> float:
        """Return the estimated rows of an item without known sizes."""
        cost = self._asked[mm_hash] = slot_cost(modality, image)
        return cost * self._rows.get(modality, FIRST_ROWS)

    def bytes_of(self, num_rows: float) -> int:
        return int(num_rows * self._row_bytes)

    def observe(self, metadata: EncoderCacheMetadata) -> None:
        """Learn rows and bytes from an item's metadata."""
        num_rows = float(metadata.num_embeds)
        self._row_bytes = _mean(self._row_bytes, metadata.num_bytes / num_rows)
        self.mean_rows = _mean(self.mean_rows, num_rows)
        if (cost := self._asked.pop(MmHash(metadata.mm_hash), None)) is not None:
            before = self._rows.get(metadata.modality, num_rows / cost)
            self._rows[metadata.modality] = _mean(before, num_rows / cost)


def _mean(before: float, latest: float) -> float:
    return before + WEIGHT * (latest - before)


@dataclass(slots=True)
class _Read:
    """Backlogs read from a namespace's streams."""

    backlogs: Backlogs
    num_own: Mapping[str, int]  # of them, by store
    at: float  # monotonic seconds


@dataclass(slots=True)
class _Facts:
    """Facts derived from the records alone, once for each read of the registry."""

    store_of: dict[str, str] = field(default_factory=dict)  # by instance
    encoders: dict[str, dict[str, list[float | None]]] = field(default_factory=dict)
    """Seconds per row of each encoder, by namespace and store."""


class EncodeStores:
    """Stores with encoders, for one event loop; `now` is in monotonic seconds."""

    def __init__(
        self,
        records: Callable[[], Sequence[InstanceRecord]],
        *,
        settings: TransferSettings,
        measured_s: TransferSeconds = lambda source, target, num_bytes: None,
    ) -> None:
        """Store the records' source, which returns a new object after each read of the registry."""
        self._records = records
        self._settings = settings
        self._measured_s = measured_s
        self._seen: Sequence[InstanceRecord] = ()
        self._known = _Facts()
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)
        self._last: LRUCache[str, tuple[str, ...]] = LRUCache(MAX_NAMESPACES)
        self._served_since: dict[str, float] = {}  # monotonic seconds, of namespaces with encoders
        self.rows = RowEstimates()

    def stores_of(self, namespace_digest: str) -> tuple[str, ...]:
        """Return the stores that may get a job, by name: those with encoders, else the last ones, or any."""
        found = tuple(sorted(self._facts().encoders.get(namespace_digest, ())))
        if found:
            self._last[namespace_digest] = found
        known = (
            found or self._last.get(namespace_digest, ()) or tuple(sorted(set(self._known.store_of.values())))
        )
        return known or (DEFAULT_STORE,)

    def has_encoders(self, namespace_digest: str) -> bool:
        return namespace_digest in self._facts().encoders

    def num_encoders(self, namespace_digest: str) -> int:
        return sum(map(len, self._facts().encoders.get(namespace_digest, {}).values()))

    def served_s(self, namespace_digest: str, now: float) -> float:
        """Return the seconds for which the namespace has had encoders; 0 without any.

        Infinite where the first read of the registry had one.
        """
        if not self.has_encoders(namespace_digest):
            return 0.0
        return max(0.0, now - self._served_since[namespace_digest])

    def note_backlogs(
        self, namespace_digest: str, backlogs: Backlogs, num_own: Mapping[str, int], now: float
    ) -> None:
        self._reads[namespace_digest] = _Read(backlogs, num_own, now)

    def choose(
        self,
        namespace_digest: str,
        mm_hash: MmHash,
        modality: Modality,
        image: ImageProperties | None,
        *,
        num_rows: int | None,
        prefill_decode: str,
        target: str | None = None,
        num_own: Mapping[str, int],
        only_near: str | None,
        now: float,
    ) -> JobPlace:
        """Return the place of a job for an item needed at `target`, else at the store of `prefill_decode`.

        Args:
            num_rows: rows of the item; None: not known yet.
            num_own: jobs that this gateway has published, by store.
            only_near: the store whose encoders shall have it, if it has any.
        """
        facts, stores = self._facts(), self.stores_of(namespace_digest)
        if namespace_digest not in facts.encoders:
            return JobPlace(stores[0], PlaceReason.NO_ENCODER, 0)
        target = target or facts.store_of.get(prefill_decode)
        if len(stores) == 1 and only_near is None and target in (None, stores[0]):
            return choose_place({stores[0]: 0.0}, stores[0], lambda store: 0.0)
        rows = self.rows.rows_of(mm_hash, modality, image) if num_rows is None else num_rows
        num_bytes = self.rows.bytes_of(rows)

        def transfer_s(store: str) -> float:
            return self._transfer_s(store, target or store, num_bytes)

        waits_s = {each: self._wait_s(namespace_digest, each, num_own, now) for each in stores}
        return choose_place(waits_s, target, transfer_s, only_near=only_near)

    def _transfer_s(self, source: str, target: str, num_bytes: int) -> float:
        measured_s = self._measured_s(source, target, num_bytes)
        if measured_s is not None:
            return measured_s
        return self._settings.link_round_trip_s + num_bytes / self._settings.link_bytes_per_s

    def _wait_s(self, namespace_digest: str, store: str, num_own: Mapping[str, int], now: float) -> float:
        """Return the seconds until a job that is published now is begun."""
        num_jobs, read = num_own.get(store, 0), self._reads.get(namespace_digest)
        if read is not None and now - read.at < READ_HOLDS_S and store in read.backlogs:
            since = num_jobs - read.num_own.get(store, 0)
            num_jobs = max(num_jobs, read.backlogs[store].num_jobs + since)
        encoders = self._facts().encoders[namespace_digest]
        said = [row_s for each in encoders.values() for row_s in each if row_s is not None]
        usual_s = sum(said) / len(said) if said else FIRST_ROW_S
        rate = sum(1 / (usual_s if row_s is None else row_s) for row_s in encoders[store])  # rows a second
        return num_jobs * self.rows.mean_rows / rate

    def _facts(self) -> _Facts:
        records = self._records()
        if records is not self._seen:
            since = time.monotonic() if self._seen else float("-inf")
            self._seen, self._known = records, _facts(records)
            before = self._served_since
            self._served_since = {each: before.get(each, since) for each in self._known.encoders}
        return self._known


def _facts(records: Sequence[InstanceRecord]) -> _Facts:
    facts = _Facts({each.instance: each.store for each in records if each.store is not None})
    for each in records:
        if each.role in ENCODING_ROLES and not each.draining and each.namespace_digest is not None:
            stores = facts.encoders.setdefault(each.namespace_digest, {})
            stores.setdefault(store_of(each), []).append(each.row_s)
    return facts
