"""The scripts take the steps of the table `ALLOWED`, and no others."""

from typing import Any

import pytest

from tests.integration.common.flight_samples import DIGEST, HASH, METADATA, claim, job_for, requester_at
from triptych_common.bus import AsyncBus
from triptych_common.coordination import JobOffer, SingleFlight
from triptych_common.coordination.single_flight import ALLOWED, PRELUDE, FlightState
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import EncodeFailed, FailureKind
from triptych_common.protocol.names import StreamNames

FIRST, SECOND = requester_at("first"), requester_at("second")
STREAM = StreamNames("test").encode_jobs(DIGEST)
JOB = job_for(FIRST)
BECOME = f"local flight = KEYS[1]\n{PRELUDE}\nbecome(ARGV[1], put, {{'entry'}}, 'until', 7)"
FIELDS = {
    "job": "job-1",
    "attempt": 1,
    "entry": "1-1",
    "stream": STREAM,
    "encoder": "e",
    "until": 0,
    "num_sent": 1,
}
STATES = [None, *FlightState]


async def put(bus: AsyncBus, state: str | None, **fields: Any) -> None:
    """A flight of one requester in `state`, whatever it takes to get there."""
    await bus.client.delete(bus.names.inflight(DIGEST, HASH))
    if state is not None:
        requester = {f"r:{FIRST.request_id}/0": f"99999999999999 {FIRST.model_dump_json()}"}
        await bus.client.hset(
            bus.names.inflight(DIGEST, HASH), mapping={"state": state, **FIELDS, **fields, **requester}
        )


async def read(bus: AsyncBus) -> dict[str, str]:
    found = await bus.client.hgetall(bus.names.inflight(DIGEST, HASH))
    return {name.decode(): value.decode() for name, value in found.items()}


def may_follow(state: FlightState | None) -> frozenset[FlightState]:
    return frozenset({FlightState.CLAIMED}) if state is None else ALLOWED[state]


@pytest.mark.parametrize("to", FlightState)
@pytest.mark.parametrize("state", STATES)
async def test_become_takes_the_steps_of_the_table_and_refuses_all_others(
    bus: AsyncBus, state: FlightState | None, to: FlightState
) -> None:
    await put(bus, state)
    before = await read(bus)
    call = bus.client.eval(BECOME, 1, bus.names.inflight(DIGEST, HASH), to)
    if to in may_follow(state):
        await call
        after = {name: value for name, value in before.items() if name != "entry"}
        assert await read(bus) == {**after, "state": to, "until": "7"}
    else:
        with pytest.raises(Exception, match=f'a flight may not go from "{state or ""}" to "{to}"'):
            await call
        assert await read(bus) == before


async def every_step(flights: SingleFlight, name: str) -> None:
    failure = EncodeFailed(
        job_id="job-1", mm_hash=HASH, encoder="e", kind=FailureKind.ENCODER_ERROR, detail="x"
    )
    match name:
        case "new" | "retry" | "check":
            await claim(flights, SECOND, name)
        case "publish":
            await flights.publish_job(JobOffer(JOB))
        case "leave":
            await flights.leave_flight(HASH, [(FIRST.request_id, 0)], namespace_digest=DIGEST)
        case "start":
            await flights.start_job(JOB, "1-2", "e", lease_s=9, ttl_s=9)
        case "renew":
            await flights.renew_job(
                HASH, "job-1", "1-1", "e", lease_s=9, stream=STREAM, namespace_digest=DIGEST
            )
        case "announce":
            await flights.announce_metadata(METADATA, namespace_digest=DIGEST)
        case "finish":
            await flights.finish_flight(METADATA, [(FIRST.request_id, 0)], namespace_digest=DIGEST)
        case _:
            await flights.fail_flight(failure, namespace_digest=DIGEST)


STEPS = ["new", "retry", "check", "publish", "leave", "start", "renew", "announce", "finish", "fail"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", STATES)
async def test_no_step_of_a_gateway_or_an_encoder_leaves_the_table(
    bus: AsyncBus, flights: SingleFlight, state: FlightState | None, step: str
) -> None:
    await put(bus, state)
    await every_step(flights, step)
    after = (await read(bus)).get("state")
    assert after in {None, state, *may_follow(state)}


@pytest.mark.parametrize("step", ["start", "renew", "finish", "fail"])
async def test_a_state_that_is_not_in_the_table_is_left_alone(
    bus: AsyncBus, flights: SingleFlight, step: str
) -> None:
    """As of a newer version."""
    await put(bus, "resting")
    before = await read(bus)
    with pytest.raises(BusUnavailableError, match=r'[a-z_]+: .*a flight may not go from "resting"'):
        await every_step(flights, step)
    assert await read(bus) == before
