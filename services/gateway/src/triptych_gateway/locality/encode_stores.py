"""EncodeStores: the stores whose encoders take a namespace's jobs, and how long a job waits at each.

A job waits for those before it on the stream: all gateways' jobs, as they were last read with a claim, and
what this gateway has published or seen end since. The encoders of a store work on them at once, each at the
speed that it announces in the registry.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cachetools import LRUCache

from triptych_common.coordination import Backlogs, store_of
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncoderCacheMetadata, ImageProperties, InstanceRecord, Modality
from triptych_common.protocol.names import DEFAULT_STORE
from triptych_gateway.locality.job_place import JobPlace, PlaceReason, choose_place
from triptych_gateway.locality.row_estimates import RowEstimates
from triptych_gateway.routing.router import ENCODING_ROLES

FIRST_ROW_S = 2e-4  # an encoder's, until one of the namespace announces its speed
READ_HOLDS_S = 5.0  # a reading of the streams counts for this long
MAX_NAMESPACES = 64

TransferSeconds = Callable[[str, str, int], float | None]
"""Seconds of a transfer of some bytes from one store to another; None if it was not measured."""


@dataclass(frozen=True, slots=True)
class LinkDefaults:
    """Assumed speed of a link between stores that was not measured."""

    bytes_per_s: float = 125e6  # 1 Gbit/s
    round_trip_s: float = 0.001

    def seconds(self, num_bytes: int) -> float:
        return self.round_trip_s + num_bytes / self.bytes_per_s


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
        link: LinkDefaults,
        measured_s: TransferSeconds = lambda source, target, num_bytes: None,
    ) -> None:
        """Store the records' source, which returns a new object after each read of the registry."""
        self._records = records
        self._link = link
        self._measured_s = measured_s
        self._seen: Sequence[InstanceRecord] = ()
        self._known = _Facts()
        self._reads: LRUCache[str, _Read] = LRUCache(MAX_NAMESPACES)
        self._last: LRUCache[str, tuple[str, ...]] = LRUCache(MAX_NAMESPACES)
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
        """Return whether each of `stores_of` has encoders."""
        return namespace_digest in self._facts().encoders

    def num_encoders(self, namespace_digest: str) -> int:
        """Return the number of the namespace's encoders, over all stores."""
        return sum(map(len, self._facts().encoders.get(namespace_digest, {}).values()))

    def note_backlogs(
        self, namespace_digest: str, backlogs: Backlogs, num_own: Mapping[str, int], now: float
    ) -> None:
        """Record backlogs that were read, with this gateway's own jobs by store."""
        self._reads[namespace_digest] = _Read(backlogs, num_own, now)

    def on_metadata(self, metadata: EncoderCacheMetadata) -> None:
        """Learn the rows of an item from its metadata."""
        self.rows.observe(metadata)

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
        return self._link.seconds(num_bytes) if measured_s is None else measured_s

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
            self._seen, self._known = records, _facts(records)
        return self._known


def _facts(records: Sequence[InstanceRecord]) -> _Facts:
    facts = _Facts({each.instance: each.store for each in records if each.store is not None})
    for each in records:
        if each.role in ENCODING_ROLES and not each.draining and each.namespace_digest is not None:
            stores = facts.encoders.setdefault(each.namespace_digest, {})
            stores.setdefault(store_of(each), []).append(each.row_s)
    return facts
