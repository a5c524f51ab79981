"""Some services of a system end for good, as `drain` asks for, and the others go on."""

import asyncio

from tests.integration.cli.test_supervisor import Watched, fake, layout
from triptych_cli.supervisor.control import request_services, serving_requests
from triptych_cli.supervisor.state import ServiceState
from triptych_cli.supervisor.supervisor import run_directory
from triptych_cli.system.layout import RunLayout

__all__ = ["layout"]  # the fixture


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
