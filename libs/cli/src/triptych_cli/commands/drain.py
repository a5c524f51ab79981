"""`drain HOST`: empties this host, while the others go on.

    1  entries that fit elsewhere go there, most recently used first; everything here still serves
    2  gateways and engines here drain: they take nothing new, and finish what they have
    3  entries that came meanwhile go, too
    4  the fabric agent ends, then the store, then the supervisor, as with `down`

It runs on the host itself, since the store answers only there: access to Redis does not suffice to end a
host.
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from rich.markup import escape

from triptych_cli.commands.clients import list_entries, message_bus, store_session
from triptych_cli.commands.hosts.host_report import hosts_of
from triptych_cli.commands.hosts.mover import (
    MovePlan,
    Mover,
    MoveResults,
    note_places,
    plan_moves,
    silent_stores,
    target_rooms,
)
from triptych_cli.commands.status_tables import read_records
from triptych_cli.console import fail, format_bytes, out
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor import daemon
from triptych_cli.supervisor.control import request_services
from triptych_cli.supervisor.state import NOTHING_RUNS, HostStatus, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import RunLayout, lasting_layout
from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError, TriptychError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.protocol.store import EntryInfo

AGENTS_TIMEOUT_S = 15.0  # for agents that are being started again, and have not told their room yet
ASK_AGAIN_S = 0.5
LATE_TIMEOUT_S = 60.0  # for entries that came while the engines ended
WRONG_HOST = 2


def drain(name: str, timeout_s: float) -> int:
    """Drain this host; 0 if it is empty and all that fits elsewhere is there, 1 if not.

    2: `name` is not this host, or the host must not be drained. 3: nothing runs.
    """
    layout = lasting_layout(CliSettings())
    status = read_status(layout.state_file)
    if status is None or not is_supervised(layout):
        fail("nothing is running here; drain a host on its own machine, in its own run directory")
        return NOTHING_RUNS
    host = status.host
    if host is None:
        fail("this system has one host: ./triptych down ends it")
        return WRONG_HOST
    if (refusal := asyncio.run(_why_not(host, name))) is not None:
        fail(refusal)
        return WRONG_HOST
    return empty_host(
        host, timeout_s, lambda: _stop_engines(layout, status, host), lambda: daemon.stop_system(layout)
    )


def empty_host(
    host: HostStatus, timeout_s: float, stop_engines: Callable[[], bool], stop_rest: Callable[[], list[str]]
) -> int:
    """Run all steps for a host that may be drained; returns the exit code.

    Args:
        stop_engines: ends the services that answer requests; returns whether all of them have ended.
        stop_rest: ends all other services; returns the names of those that could not be ended.
    """
    first = _move(host, timeout_s, {})
    if not stop_engines():
        return 1
    second = _move(host, min(timeout_s, LATE_TIMEOUT_S), first.moved)
    with out.status("stopping the agent and the store ..."):
        left = stop_rest()
    if left:
        fail(f"not everything could be ended: {', '.join(left)}")
        return 1
    if (why := _left_behind(first, second)) is not None:
        fail(f"{host.name} is empty, but {why}: what asks for them is encoded anew")
        return 1
    out.print(f"{escape(host.name)} is empty: no process, socket or shared memory is left")
    return 0


async def _why_not(host: HostStatus, name: str) -> str | None:
    """Reason not to drain this host, or None."""
    try:
        hosts = [each.name for each in hosts_of(await read_records())]
    except (TriptychError, OSError) as error:
        return f"the hosts are not known: {error}"
    if host.name != name:
        if name in hosts:
            return f"{name} is another machine, or another run directory: drain it there; this is {host.name}"
        return f"there is no host {name}; there are: {', '.join(hosts)}"
    if host.runs_redis and (others := [each for each in hosts if each != name]):
        return (
            f"the system's Redis runs here, and goes with this host: {', '.join(others)} would be cut off; "
            "drain those first, or run the system on a Redis of its own"
        )
    return None


def _move(host: HostStatus, timeout_s: float, done: dict[str, str]) -> MoveResults:
    """Move entries of the host's store that fit elsewhere; failures are printed and do not stop the drain."""
    try:
        return asyncio.run(_moved(host, time.monotonic() + timeout_s, done))
    except (TriptychError, OSError) as error:
        fail(f"entries cannot be moved: {error}")
        return MoveResults(failures={"": "they could not be ordered"})


def _left_behind(first: MoveResults, second: MoveResults) -> str | None:
    """Entries that should have been moved and were not, with reasons; None if there are none."""
    failures = {
        mm_hash: why
        for mm_hash, why in (first.failures | second.failures).items()
        if mm_hash not in second.moved
    }
    reasons = sorted(set(failures.values()))
    return f"{len(failures)} entries could not be moved ({', '.join(reasons)})" if failures else None


async def _moved(host: HostStatus, deadline: float, done: dict[str, str]) -> MoveResults:
    entries = await _entries()
    async with message_bus() as bus:
        is_needed = any(each.mm_hash not in done for each in entries)
        until = min(deadline, time.monotonic() + (AGENTS_TIMEOUT_S if is_needed else 0.0))
        records = await _settled_records(Registry(bus), host, until)
        is_there, silent = _has_agent(records, host), silent_stores(records, host.store)
        plan = plan_moves(entries, target_rooms(records, host.store) if is_there else [], done)
        failures: dict[str, str] = {}
        if not is_there:
            failures = dict.fromkeys(plan.without_room, "the agent of this host is not registered")
        elif silent:
            failures = dict.fromkeys(plan.without_room, f"no word from the agent of {', '.join(silent)}")
        _show_plan(plan, is_known=not failures)
        with out.status("moving entries ...") as spinner:

            def on_progress(results: MoveResults) -> None:
                spinner.update(f"moving entries: {results.num_moved} of {len(plan.moves)} ...")

            mover = Mover(bus, host.agent, host.store, on_progress)
            await mover.move(plan.moves, deadline)
        try:
            await note_places(bus, plan.moves, mover.results.moved, records)
        except BusUnavailableError as error:
            fail(f"the directory of entries does not know what was moved: {error}")
    results = mover.results
    results.failures.update(failures)
    if plan.moves:
        out.print(
            f"  [green]✓[/] moved {results.num_moved} of {len(plan.moves) - results.num_gone} entries, "
            f"{format_bytes(results.num_bytes)} over the network"
        )
    return results


async def _entries() -> list[EntryInfo]:
    async with store_session() as session:
        return await list_entries(session)


async def _settled_records(registry: Registry, host: HostStatus, until: float) -> list[InstanceRecord]:
    """All records, once the agents have reported what a plan needs, or at `until`."""
    with out.status("waiting for the fabric agents ..."):
        while True:
            records = await registry.list_instances()
            is_settled = _has_agent(records, host) and not silent_stores(records, host.store)
            left_s = until - time.monotonic()
            if is_settled or left_s <= 0:
                return records
            await asyncio.sleep(min(ASK_AGAIN_S, left_s))


def _has_agent(records: Sequence[InstanceRecord], host: HostStatus) -> bool:
    return any(each.instance == host.agent and each.role is Role.FABRIC for each in records)


def _show_plan(plan: MovePlan, *, is_known: bool) -> None:
    """Print the plan; `is_known` is true if the free space elsewhere is known."""
    if plan.moves:
        stores = ", ".join(sorted({each.target for each in plan.moves}))
        num_bytes = sum(each.num_bytes for each in plan.moves)
        out.print(f"  {len(plan.moves)} entries, {format_bytes(num_bytes)}, go to {escape(stores)}")
    if plan.without_room and is_known:
        out.print(
            f"  {len(plan.without_room)} entries fit in no other store without an eviction: they stay behind"
        )
    if plan.num_left:
        out.print(f"  {plan.num_left} entries are being written, or lie on a GPU: they stay behind")


def _stop_engines(layout: RunLayout, status: SystemStatus, host: HostStatus) -> bool:
    """Stop everything that serves, but not agent, store and Redis; True if all has ended."""
    names = tuple(each.name for each in status.services if each.name not in (host.agent, host.store, "redis"))
    try:
        with out.status("draining ...") as spinner:
            for report in request_services(layout.control_socket, "stop", names):
                if report.kind == "failed":
                    fail(report.message)
                    return False
                if report.kind == "done":
                    out.print(f"  [green]✓[/] {len(names)} instances have drained and ended")
                    return True
                spinner.update(f"draining: {report.service} ...")
    except OSError as error:
        fail(f"the supervisor accepts no requests: {error.strerror}")
        return False
    fail("the supervisor ended before all instances had drained")
    return False
