"""JobWindow: bound on this gateway's jobs with encoders; further ones wait here, in turns. Pure.

A stream keeps the order of publication, so a gateway publishes no more than a namespace's encoders can hold:
`num_slots` of all of them together, over the streams of all stores. The last of them (`num_spare`) are for
flows that have no job there: such a flow need not wait for another's job to end.

Several gateways share the slots. Each may always have an equal part of them, at least one job. Beyond that it
goes by what it last read of the streams' lengths: of the places that were free it may take an equal part, so
that those who read at once do not take the same places; and a job of its own that ends leaves its place to
the next one that waits. With S places and G gateways that know of each other no more than 3 S + G jobs are on
the streams, whatever each of them reads when: while there are S or more, no reading allows any; what was
allowed before and is not used is S + G at most, and equal parts are S together. After a few readings it is S.
A gateway that does not know of a store yet reads less than there is, by that store's jobs, until its next
read of the registry.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.routing.router import ENCODING_ROLES

SPARE_PART = 4  # one of this many slots of an encoder is spare


@dataclass(frozen=True, slots=True)
class Capacity:
    num_slots: int
    num_spare: int  # of them, for flows that have none
    num_gateways: int


class EncodeCapacity:
    """Capacities, computed once for each read of the registry, not for each job."""

    def __init__(self, records: Callable[[], Sequence[InstanceRecord]]) -> None:
        """Store the records' source, which returns a new object after each read of the registry."""
        self._records = records
        self._seen: Sequence[InstanceRecord] = ()
        self._known: dict[str, Capacity] = {}

    def of(self, namespace_digest: str) -> Capacity:
        records = self._records()
        if records is not self._seen:
            self._seen, self._known = records, {}
        if namespace_digest not in self._known:
            self._known[namespace_digest] = _capacity(records, namespace_digest)
        return self._known[namespace_digest]


def _capacity(records: Sequence[InstanceRecord], namespace_digest: str) -> Capacity:
    alive = [each for each in records if not each.draining]
    encoders = [r for r in alive if r.role in ENCODING_ROLES and r.namespace_digest == namespace_digest]
    return Capacity(
        num_slots=sum(each.num_slots for each in encoders),
        num_spare=sum(each.num_slots // SPARE_PART for each in encoders),
        num_gateways=sum(each.role is Role.GATEWAY for each in alive),
    )


SLOTS_OF_NONE = 8  # without a registered encoder: jobs for one that may come


@dataclass(slots=True)
class _Job:
    namespace_digest: str
    flow: str
    is_published: bool = False
    store: str | None = None  # store whose encoders it was published for


@dataclass(slots=True)
class _Read:
    num_jobs: int  # of all gateways
    num_own: int  # of them, and of those that others took the places of at once


class JobWindow:
    """Running jobs that were published here, or are about to be."""

    def __init__(self, capacity: Callable[[str], Capacity]) -> None:
        """Store the function that returns a namespace's capacity by digest."""
        self._capacity = capacity
        self._jobs: dict[MmHash, _Job] = {}
        self._by_flow: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by namespace
        self._reads: dict[str, _Read] = {}  # by namespace

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, mm_hash: MmHash) -> bool:
        return mm_hash in self._jobs

    def num_jobs(self, namespace_digest: str) -> int:
        return self.num_by_flow(namespace_digest).total()

    def num_by_flow(self, namespace_digest: str) -> Counter[str]:
        return self._by_flow.get(namespace_digest, Counter[str]())

    def has_room(self, namespace_digest: str, flow: str) -> bool:
        capacity = self._capacity(namespace_digest)
        own = self.num_by_flow(namespace_digest)
        num_places = _places(capacity, is_new=not own[flow])
        if capacity.num_gateways <= 1:
            return own.total() < num_places
        part = max(1, num_places // capacity.num_gateways)
        read, num_allowed = self._reads.get(namespace_digest), 0
        if read is not None:
            num_free = max(0, num_places - read.num_jobs)
            num_allowed = read.num_own + math.ceil(num_free / capacity.num_gateways)
        return own.total() < max(part, min(num_places, num_allowed))

    def begin_job(self, mm_hash: MmHash, namespace_digest: str, flow: str) -> None:
        """Begin a job that is about to be published. Idempotent."""
        if mm_hash not in self._jobs:
            self._jobs[mm_hash] = _Job(namespace_digest, flow)
            self._by_flow[namespace_digest][flow] += 1

    def confirm_job(self, mm_hash: MmHash, store: str) -> None:
        if mm_hash in self._jobs:
            job = self._jobs[mm_hash]
            job.is_published, job.store = True, store

    def num_by_store(self, namespace_digest: str) -> Counter[str]:
        """Return running jobs published here, by store."""
        jobs = self._jobs.values()
        return Counter(
            each.store for each in jobs if each.store and each.namespace_digest == namespace_digest
        )

    def end_unpublished(self, mm_hash: MmHash) -> bool:
        """End the step that was to publish the job; return whether it was published."""
        if mm_hash in self._jobs and not self._jobs[mm_hash].is_published:
            self.end_job(mm_hash)
        return mm_hash in self._jobs

    def end_job(self, mm_hash: MmHash, *, is_followed: bool = False) -> bool:
        """End a job; return False without one. `is_followed`: another job takes its place at once."""
        job = self._jobs.pop(mm_hash, None)
        if job is None:
            return False
        if not is_followed and job.namespace_digest in self._reads:
            self._reads[job.namespace_digest].num_own -= 1
        flows = self._by_flow[job.namespace_digest]
        flows[job.flow] -= 1
        if not flows[job.flow]:
            del flows[job.flow]
        if not flows:
            del self._by_flow[job.namespace_digest]
        return True

    def note_stream(self, namespace_digest: str, num_jobs: int) -> None:
        self._reads[namespace_digest] = _Read(num_jobs, self.num_jobs(namespace_digest))

    def forget_streams(self) -> None:
        """Forget what was read from the streams, which is old."""
        self._reads.clear()


def _places(capacity: Capacity, *, is_new: bool) -> int:
    if not capacity.num_slots:
        return SLOTS_OF_NONE
    return capacity.num_slots if is_new else capacity.num_slots - capacity.num_spare
