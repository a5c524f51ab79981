"""States of a flight, and the steps between them, for Python and for the scripts in `lua/`.

    None --claim--> CLAIMED --publish--> QUEUED --start--> RUNNING --finish--> FINISHED --all left--> None
                       |                    |                  `--fail--> FAILED --claim--> CLAIMED ...
                       `--last one leaves---+--> None (a queued job is taken off the stream)

A claim with an offered job goes on to QUEUED in one step. Besides: a claim or a job that was lost is
claimed again; a start of a job whose flight Redis lost begins at CLAIMED; a Redis that is out of memory or
comes back empty notes no start, so the end can come from CLAIMED and QUEUED; a job that failed for one
encoder can be finished by another. `become` in `lua/flight.lua` alone assigns the state; a step that is not
in the table is an error of the script, and the state stays.
"""

from enum import StrEnum
from importlib.resources import files


class FlightState(StrEnum):
    """States of a flight, in the hash field `state`."""

    CLAIMED = "claimed"  # a gateway is about to publish the job
    QUEUED = "queued"  # on the stream, no encoder has announced its item
    RUNNING = "running"  # an encoder works on it, and has announced its item
    FINISHED = "finished"  # sealed; stays for requesters that the result did not reach
    FAILED = "failed"  # stays until it is claimed again or all have left


_ENDS = {FlightState.FINISHED, FlightState.FAILED}
ALLOWED: dict[FlightState, frozenset[FlightState]] = {
    FlightState.CLAIMED: frozenset({FlightState.CLAIMED, FlightState.QUEUED, FlightState.RUNNING, *_ENDS}),
    FlightState.QUEUED: frozenset({FlightState.CLAIMED, FlightState.RUNNING, *_ENDS}),
    FlightState.RUNNING: frozenset({FlightState.CLAIMED, FlightState.RUNNING, *_ENDS}),
    FlightState.FINISHED: frozenset({FlightState.CLAIMED, FlightState.FINISHED}),
    FlightState.FAILED: frozenset({FlightState.CLAIMED, *_ENDS}),
}


def _lua_set(states: frozenset[FlightState]) -> str:
    return "{" + ", ".join(f"{each} = true" for each in sorted(states)) + "}"


_ROWS = [f"{state} = {_lua_set(follows)}" for state, follows in ALLOWED.items()]
_FIRST = _lua_set(frozenset({next(iter(ALLOWED))}))  # what begins a flight, as for `check_transition`
_SHARED = f"local ALLOWED = {{[''] = {_FIRST}, {', '.join(_ROWS)}}}\n" + files(__package__).joinpath(
    "lua", "flight.lua"
).read_text("utf-8")
PRELUDE = f"local READS_REQUESTERS = false\n{_SHARED}"
PRELUDE_WITH_REQUESTERS = f"local READS_REQUESTERS = true\n{_SHARED}"
