"""Rolling restart of real processes (fake services), by request over the supervisor's socket."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.cli.test_supervisor import Watched, fake, layout
from triptych_cli.supervisor.control import ServicesReport, request_services, serving_requests
from triptych_cli.supervisor.state import ServiceState
from triptych_cli.supervisor.supervisor import run_directory
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.topology import ServiceSpec

__all__ = ["layout"]  # the fixture


def failing_later(name: str, folder: Path) -> ServiceSpec:
    """Starts well once, and not again."""
    spec, mark = fake(name), folder / "mark"
    script = f'[ -e {mark} ] && exit 9; : > {mark}; exec "$@"'
    return replace(spec, argv=("/bin/sh", "-c", script, "sh", *spec.argv))


async def order(run: RunLayout, *services: str) -> list[ServicesReport]:
    return await asyncio.to_thread(lambda: list(request_services(run.control_socket, "restart", services)))


async def test_one_after_the_other_each_when_the_one_before_is_ready(layout: RunLayout) -> None:
    with run_directory(layout):
        low, high, other = (
            fake("low"),
            fake("high", after=frozenset({"low"})),
            fake("other"),
        )
        watched = Watched(layout, low, other, high)
        async with watched.supervisor.running(), serving_requests(watched.supervisor, layout.control_socket):
            pids = {name: watched.pid(name) for name in ("low", "high", "other")}
            watched.reports.clear()
            reports = await order(layout, "high", "low")
            assert [(each.kind, each.service) for each in reports] == [
                ("restarting", "low"),
                ("restarting", "high"),
                ("done", ""),
            ]
            assert {name for name, pid in pids.items() if watched.pid(name) != pid} == {"low", "high"}
            for report in watched.reports:
                assert sum(service.state is not ServiceState.READY for service in report.services) <= 1
                assert all(service.num_restarts == 0 for service in report.services)
            expected = [ServiceState.STOPPING, ServiceState.STARTING, ServiceState.READY]
            assert watched.states("low")[:3] == expected


async def test_the_next_ones_are_left_alone_when_one_fails(layout: RunLayout, tmp_path: Path) -> None:
    with run_directory(layout):
        watched = Watched(layout, failing_later("first", tmp_path), fake("second"))
        async with watched.supervisor.running(), serving_requests(watched.supervisor, layout.control_socket):
            second = watched.pid("second")
            reports = await order(layout, "first", "second")
            assert [each.kind for each in reports] == ["restarting", "failed"]
            assert reports[-1].message == "first exited with code 9"
            assert watched.pid("second") == second
            # It is tried again all the same, as after any other failure.
            await watched.until(lambda status: status.services[0].num_restarts >= 1)
            again = await order(layout, "first")
            assert "not ready" in again[-1].message


async def test_one_order_at_a_time(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running(), serving_requests(watched.supervisor, layout.control_socket):

            def first_and_second() -> Iterator[ServicesReport]:
                first = request_services(layout.control_socket, "restart", ("one",))
                yield next(first)
                yield from request_services(layout.control_socket, "restart", ("one",))
                yield from first

            reports = await asyncio.to_thread(lambda: list(first_and_second()))
            assert [each.kind for each in reports] == ["restarting", "failed", "done"]


async def test_the_end_of_the_system_ends_a_restart(layout: RunLayout) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("busy", "--ignore-sigterm", stop_timeout_s=0.3), fake("other"))
        async with (
            asyncio.TaskGroup() as group,
            watched.supervisor.running(),
            serving_requests(watched.supervisor, layout.control_socket),
        ):
            asked = group.create_task(order(layout, "busy", "other"))
            await watched.until(lambda status: status.services[0].state is ServiceState.STOPPING)
        assert [each.kind for each in asked.result()] == ["restarting", "failed"]
        assert [service.pid for service in watched.supervisor.status().services] == [None, None]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"nonsense\n",
        b'{"command": "restart", "services": 3}\n',
        b'{"command": "erase", "services": []}\n',
    ],
)
async def test_what_is_no_order_is_not_answered(layout: RunLayout, line: bytes) -> None:
    with run_directory(layout):
        watched = Watched(layout, fake("one"))
        async with watched.supervisor.running(), serving_requests(watched.supervisor, layout.control_socket):
            reader, writer = await asyncio.open_unix_connection(layout.control_socket)
            writer.write(line)
            writer.write_eof()
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()


# ---- some services end for good, as `drain` asks for ---------------------------------------------
async def test_dependents_end_first_and_the_rest_goes_on(layout: RunLayout) -> None:
    with run_directory(layout):
        store = fake("store")
        engine, gateway = (
            fake("engine", after=frozenset({"store"})),
            fake("gateway", after=frozenset({"engine"})),
        )
        watched = Watched(layout, store, engine, gateway)
        async with watched.supervisor.running(), serving_requests(watched.supervisor, layout.control_socket):
            pid = watched.pid("store")
            for _ in range(2):  # what was stopped before stays so
                reports = await asyncio.to_thread(
                    lambda: list(request_services(layout.control_socket, "stop", ("engine", "gateway")))
                )
                assert [(each.kind, each.service) for each in reports] == [
                    ("stopping", "gateway"),
                    ("stopping", "engine"),
                    ("done", ""),
                ]
            states = {each.name: each.state for each in watched.supervisor.status().services}
            assert states == {
                "store": ServiceState.READY,
                "engine": ServiceState.STOPPED,
                "gateway": ServiceState.STOPPED,
            }
            assert watched.pid("store") == pid
            assert watched.supervisor.status().services[1].num_restarts == 0
