"""The scripts on a real Redis do what the model of flights does, in any order of steps and losses."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.integration.common.flight_samples import DIGEST, HASH, METADATA
from tests.support.examples import examples
from tests.support.flight_model import FlightModel, JobsModel
from tests.support.message_samples import encode_job
from triptych_common.bus import AsyncBus
from triptych_common.coordination import ClaimResult, FlightClaim, JobOffer, SingleFlight
from triptych_common.protocol.messages import (
    EncodeFailed,
    EncodeJob,
    EncoderCacheMetadata,
    FailureKind,
    Requester,
)
from triptych_common.protocol.names import ENCODERS_GROUP

MAX_ATTEMPTS = 2
REQUESTERS = [
    Requester(request_id=f"r-{number}", item_index=0, gateway=f"g-{number % 2}", prefill_decode="pd-0")
    for number in range(3)
]
ANY_REQUESTER = st.sampled_from(REQUESTERS)
ENCODERS = st.sampled_from(["e-0", "e-1"])
JOBS = st.sampled_from(["current", "current", "current", "job-0", "job-1"])


def job_of(job_id: str, *requesters: Requester) -> EncodeJob:
    return encode_job(*requesters, job_id=job_id, mm_hash=HASH, namespace_digest=DIGEST)


STORES = ("store-0", "store-1")


def metadata_of(job_id: str) -> EncoderCacheMetadata:
    return METADATA.model_copy(update={"job_id": job_id, "encoder": "e-0", "sealed": False})


def failure_of(job_id: str, encoder: str) -> EncodeFailed:
    return EncodeFailed(
        job_id=job_id, mm_hash=HASH, encoder=encoder, kind=FailureKind.ENCODER_ERROR, detail="x"
    )


class FlightMachine(RuleBasedStateMachine):
    """Every step on both; the answers and what is left must be the same.

    `bus` is set by the test. Ids of entries differ: `entries` maps the model's to Redis's.
    """

    bus: AsyncBus
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.jobs = JobsModel()
        self.model, self.real = FlightModel(self.jobs), SingleFlight(self.bus)
        self.names = self.bus.names
        self.entries: dict[str, str] = {}
        self.jobs_of: dict[str, EncodeJob] = {}
        self.do(self._clear())

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(step)

    async def _clear(self) -> None:
        await self.bus.client.flushall()
        for store in STORES:
            stream = self.names.encode_jobs(DIGEST, store)
            await self.bus.client.xgroup_create(stream, ENCODERS_GROUP, id="0", mkstream=True)

    def job(self, job_id: str) -> str:
        """`current`: the flight's own; else any, as of a message that is late."""
        flight = self.model.flights.get(HASH)
        return job_id if job_id != "current" else flight.job_id if flight is not None else "job-2"

    def both(self, call: Callable[[Any], Coroutine[Any, Any, Any]]) -> Any:
        expected, found = self.do(call(self.model)), self.do(call(self.real))
        assert found == expected
        return found

    @rule(
        requesters=st.lists(ANY_REQUESTER, min_size=1, max_size=2),
        encoder=ENCODERS,
        num_steps=st.integers(1, 4),
    )
    def advance(self, requesters: list[Requester], encoder: str, num_steps: int) -> None:
        """What usually comes next, so that what comes late is reached too."""
        for _ in range(num_steps):
            flight = self.model.flights.get(HASH)
            if flight is None or flight.state == "failed":
                self.claim(requesters[0], "job-0", "new")
            elif flight.state == "claimed":
                self.publish(requesters[0], "current")
            elif flight.state == "queued":
                for store in STORES:
                    self.deliver(encoder, starts=True, store=store)
            else:
                self.leave(requesters)

    # ---- gateways ----
    @rule(
        requester=ANY_REQUESTER,
        job_id=JOBS,
        mode=st.sampled_from(["new", "retry", "check"]),
        with_backlog=st.booleans(),
        stores=st.sampled_from([STORES, STORES[:1], STORES[1:]]),
        has_encoders=st.booleans(),
        offers=st.booleans(),
    )
    def claim(
        self,
        requester: Requester,
        job_id: str,
        mode: Any,
        with_backlog: bool = False,
        stores: tuple[str, ...] = STORES,
        has_encoders: bool = True,
        offers: bool = False,
    ) -> None:
        """Of a gateway that knows of encoders at these stores; or of none, and of those as the last ones."""
        job_id = self.job(job_id)
        job = job_of(job_id, requester)
        offer = JobOffer(job, store=stores[-1], blob=b"media") if offers else None
        entries = list[str]()  # of the offered job: in the model, in Redis

        async def claimed(flights: Any) -> FlightClaim:
            claim: FlightClaim = await flights.claim_flight(
                HASH,
                [requester],
                namespace_digest=DIGEST,
                mode=mode,
                job_id=job_id,
                attempt=1,
                max_attempts=MAX_ATTEMPTS,
                ttl_s=600,
                stores=stores,
                has_encoders=has_encoders,
                with_backlog=with_backlog,
                offer=offer,
            )
            entries.append(claim.entry_id)
            claim = replace(claim, entry_id="")
            if claim.backlogs is None:
                return claim
            found = {each: backlog._replace(oldest_s=0.0) for each, backlog in claim.backlogs.items()}
            return replace(claim, backlogs=found)  # the model has no clock

        claim: FlightClaim = self.both(claimed)
        assert all(entries) or not any(entries)
        expected, found = entries
        if expected:
            assert self.entries.setdefault(expected, found) == found
            self.jobs_of[expected] = job
        assert claim.attempt <= MAX_ATTEMPTS
        if claim.result is ClaimResult.FAILED:
            assert claim.failure is not None

    @rule(requester=ANY_REQUESTER, job_id=JOBS, store=st.sampled_from(STORES))
    def publish(self, requester: Requester, job_id: str, store: str = STORES[0]) -> None:
        job = job_of(self.job(job_id), requester)
        expected = self.do(self.model.publish_job(JobOffer(job, store=store)))
        found = self.do(self.real.publish_job(JobOffer(job, store=store, blob=b"media")))
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert self.entries.setdefault(expected, found) == found
            self.jobs_of[expected] = job

    @rule(requesters=st.lists(ANY_REQUESTER, min_size=1, max_size=3))
    def leave(self, requesters: list[Requester]) -> None:
        keys = [(each.request_id, each.item_index) for each in requesters]
        self.both(lambda flights: flights.leave_flight(HASH, keys, namespace_digest=DIGEST))

    # ---- encoders ----
    @rule(encoder=ENCODERS, starts=st.booleans(), store=st.sampled_from(STORES))
    def deliver(self, encoder: str, starts: bool, store: str) -> None:
        """The next entry of a stream goes to an encoder, which may do nothing with it yet."""
        stream = self.names.encode_jobs(DIGEST, store)
        read = self.do(self.bus.client.xreadgroup(ENCODERS_GROUP, encoder, {stream: ">"}, count=1))
        of_stream = (entry for entry in self.jobs.stream if self.jobs.stream_of[entry] == stream)
        waiting = [entry for entry in of_stream if self.jobs.is_new(entry)]
        assert bool(read) == bool(waiting)
        if waiting:
            self.jobs.deliver(waiting[0])
            assert read[0][1][0][0].decode() == self.entries[waiting[0]]
            if starts:
                self._start(waiting[0], encoder)

    def _some_entry(self, data: st.DataObject) -> str | None:
        return data.draw(st.sampled_from(list(self.jobs_of)[::-1])) if self.jobs_of else None

    @rule(data=st.data(), encoder=ENCODERS, knows_size=st.booleans())
    def start(self, data: st.DataObject, encoder: str, knows_size: bool) -> None:
        """Of any entry that was ever on the stream: deliveries can be late."""
        entry = self._some_entry(data)
        if entry is not None:
            self._start(entry, encoder, knows_size=knows_size)

    def _start(self, entry: str, encoder: str, *, knows_size: bool = True) -> None:
        job = self.jobs_of[entry]
        times: Any = {"lease_s": 600, "ttl_s": 600, "stream": self.jobs.stream_of[entry]}
        if knows_size:
            times["metadata"] = metadata_of(job.job_id)
        expected = self.do(self.model.start_job(job, entry, encoder, **times))
        found = self.do(self.real.start_job(job, self.entries[entry], encoder, **times))
        assert found == expected

    @rule(data=st.data(), encoder=ENCODERS)
    def renew(self, data: st.DataObject, encoder: str) -> None:
        entry = self._some_entry(data)
        if entry is not None:
            job_id = self.jobs_of[entry].job_id
            options: Any = {"lease_s": 600, "stream": self.jobs.stream_of[entry]}
            expected = self.do(
                self.model.renew_job(HASH, job_id, entry, encoder, **options, namespace_digest=DIGEST)
            )
            found = self.do(
                self.real.renew_job(
                    HASH, job_id, self.entries[entry], encoder, **options, namespace_digest=DIGEST
                )
            )
            assert found == expected

    @rule(job_id=JOBS)
    def announce(self, job_id: str) -> None:
        metadata = metadata_of(self.job(job_id))
        self.both(lambda flights: flights.announce_metadata(metadata, namespace_digest=DIGEST))

    @rule(job_id=JOBS, served=st.lists(ANY_REQUESTER, max_size=3))
    def finish(self, job_id: str, served: list[Requester]) -> None:
        metadata = metadata_of(self.job(job_id)).model_copy(update={"sealed": True})
        keys = [(each.request_id, each.item_index) for each in served]
        self.both(lambda flights: flights.finish_flight(metadata, keys, namespace_digest=DIGEST))

    @rule(job_id=JOBS, encoder=ENCODERS, by_owner=st.booleans())
    def fail(self, job_id: str, encoder: str, by_owner: bool) -> None:
        failure = failure_of(self.job(job_id), encoder)
        self.both(lambda flights: flights.fail_flight(failure, by_owner=by_owner, namespace_digest=DIGEST))

    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        entry = self._some_entry(data)
        if entry is not None and entry in self.jobs.pending:
            self.jobs.remove(entry)
            stream, entry_id = self.jobs.stream_of[entry], self.entries[entry]
            self.do(self.bus.client.xack(stream, ENCODERS_GROUP, entry_id))
            self.do(self.bus.client.xdel(stream, entry_id))

    # ---- losses ----
    @rule(what=st.sampled_from(["leases", "leases", "leases", "flights", "all"]))
    def lose(self, what: str) -> None:
        if what == "leases":
            self.model.end_leases()
            if self.model.flights:
                self.do(self.bus.client.hset(self.names.inflight(DIGEST, HASH), "until", "0"))
        elif what == "flights":
            self.model.flights.clear()
            self.do(self.bus.client.delete(self.names.inflight(DIGEST, HASH)))
        else:  # Redis comes back empty
            self.model.flights.clear()
            self.jobs.lose()
            self.do(self._clear())

    # ---- what must always hold ----
    @invariant()
    def the_same_is_left(self) -> None:
        found = self.do(self.bus.client.hgetall(self.names.inflight(DIGEST, HASH)))
        flight = self.model.flights.get(HASH)
        if flight is None:
            assert found == {}
            return
        keys = {f"r:{request_id}/{index}".encode() for request_id, index in flight.requesters}
        assert {field for field in found if field.startswith(b"r:")} == keys
        assert (found[b"job"].decode(), found[b"state"].decode()) == (flight.job_id, flight.state)
        assert int(found[b"attempt"]) == flight.attempt
        assert found.get(b"entry", b"").decode() == self.entries.get(flight.entry_id, "")
        assert found.get(b"stream", b"").decode() == flight.stream
        assert self.do(self.bus.client.pttl(self.names.inflight(DIGEST, HASH))) > 0  # nothing stays for ever

    @invariant()
    def the_same_jobs_stand_on_the_stream(self) -> None:
        for stream in (self.names.encode_jobs(DIGEST, store) for store in STORES):
            found = self.do(self.bus.client.xrange(stream))
            stand = [entry for entry in self.jobs.stream if self.jobs.stream_of[entry] == stream]
            assert {entry.decode() for entry, _ in found} == {self.entries[entry] for entry in stand}


def test_scripts_and_model_agree(redis_url: str) -> None:
    with asyncio.Runner() as runner:
        bus = runner.run(AsyncBus.connect(redis_url, "test", client_name="test"))
        try:
            FlightMachine.bus, FlightMachine.runner = bus, runner
            run_state_machine_as_test(
                FlightMachine,
                settings=settings(
                    max_examples=examples(60),
                    stateful_step_count=40,
                    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            runner.run(bus.close())
