"""The autoscaler with real processes (fake services), on gauges that a test sets."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.integration.cli.test_supervisor import Watched, fake, layout
from tests.support.waiting import until
from triptych_cli.roles import Bounds
from triptych_cli.supervisor import autoscaler
from triptych_cli.supervisor.autoscaler import (
    ENCODE_GAUGE,
    MODEL_GAUGES,
    Autoscaler,
    ScalingRules,
    StageSignal,
    signals_of,
)
from triptych_cli.supervisor.control import request_services, serving_requests
from triptych_cli.supervisor.state import ServiceState
from triptych_cli.supervisor.supervisor import run_directory
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.topology import ServiceSpec

__all__ = ["layout"]  # the fixture
TO_THREE = Bounds(0, 3)
RULES = ScalingRules(target_s=4.0, cooldown_s=0.3, cooldown_starts=0.0)


class Gauges:
    """A gateway's `/metrics`. `waiting_s` None: it fails."""

    def __init__(self) -> None:
        self.waiting_s: float | None = 0.0
        self.num_scrapes = 0
        gauges = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gauges.num_scrapes += 1
                waiting_s = gauges.waiting_s  # once: the test changes it meanwhile
                self.send_response(200 if waiting_s is not None else 500)
                self.end_headers()
                self.wfile.write(f'{ENCODE_GAUGE}{{namespace="n"}} {waiting_s}\n'.encode())

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server.server_address[1])


@pytest.fixture
def gauges(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gauges]:
    monkeypatch.setattr(autoscaler, "INTERVAL_S", 0.02)
    opened = Gauges()
    yield opened
    opened.server.shutdown()
    opened.server.server_close()


def encoder(number: int, *words: str, low: int = 0) -> ServiceSpec:
    return replace(fake(f"encoder-{number}", *words), stage="encoder", stands_by=number >= low)


class Scaled:
    """A running system of encoders and a gateway with such gauges."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched

    def states(self) -> list[ServiceState]:
        services = self.watched.supervisor.status().services
        return [each.state for each in services if each.stage == "encoder"]

    def num_ready(self) -> int:
        return self.states().count(ServiceState.READY)

    def num_stopped(self) -> int:
        return self.states().count(ServiceState.STOPPED)


@asynccontextmanager
async def running(
    layout: RunLayout, gauges: Gauges, *encoders: ServiceSpec, bounds: Bounds = TO_THREE
) -> AsyncIterator[Scaled]:
    names = frozenset(each.name for each in encoders)
    gateway = replace(fake("gateway-0", after=names), metrics_port=gauges.port)
    watched = Watched(layout, *encoders, gateway, bounds={"encoder": bounds})
    supervisor = watched.supervisor
    with run_directory(layout):
        async with supervisor.running(), serving_requests(supervisor, layout.control_socket):
            task = asyncio.get_running_loop().create_task(Autoscaler(supervisor, RULES).run())
            try:
                yield Scaled(watched)
            finally:
                task.cancel()


async def looked(gauges: Gauges, times: int = 3) -> None:
    """The autoscaler has looked at the gauges so many times."""
    seen = gauges.num_scrapes
    await until(lambda: gauges.num_scrapes >= seen + times)


async def test_encoders_follow_the_work_from_zero_and_back(layout: RunLayout, gauges: Gauges) -> None:
    async with running(layout, gauges, *(encoder(number) for number in range(3))) as scaled:
        await looked(gauges)
        assert scaled.num_stopped() == 3, "the gateway is ready without any"
        for _ in range(2):
            gauges.waiting_s = 20.0
            await until(lambda: scaled.num_ready() == 3)
            gauges.waiting_s = 0.0
            await until(lambda: scaled.num_stopped() == 3)
        shown = scaled.watched.supervisor.status().services[0]
        assert (shown.stands_by, shown.pid) == (True, None)


async def test_the_last_ones_end_first(layout: RunLayout, gauges: Gauges) -> None:
    encoders = [encoder(number, low=1) for number in range(3)]
    async with running(layout, gauges, *encoders, bounds=Bounds(1, 3)) as scaled:
        gauges.waiting_s = 8.0
        await until(lambda: scaled.num_ready() == 2)
        pid = scaled.watched.pid("encoder-0")
        gauges.waiting_s = 0.0
        await until(lambda: scaled.num_stopped() == 2)
        assert scaled.watched.pid("encoder-0") == pid


async def test_without_an_answer_nothing_changes(layout: RunLayout, gauges: Gauges) -> None:
    async with running(layout, gauges, encoder(0)) as scaled:
        gauges.waiting_s = 20.0
        await until(lambda: scaled.num_ready() == 1)
        gauges.waiting_s = None
        await looked(gauges, 40)  # longer than the cooldown
        assert scaled.num_ready() == 1


async def test_an_encoder_that_cannot_start_is_not_tried_all_the_time(
    layout: RunLayout, gauges: Gauges
) -> None:
    async with running(layout, gauges, encoder(0, "--exit-at-once", "3"), bounds=Bounds(0, 1)) as scaled:
        gauges.waiting_s = 20.0
        await until(lambda: scaled.watched.supervisor.stage_state("encoder").has_failed_start)
        await looked(gauges, 10)
        starts = [
            report for report in scaled.watched.reports if report.services[0].state is ServiceState.STARTING
        ]
        assert len({report.services[0].pid for report in starts}) == 1
        assert scaled.watched.supervisor.status().services[1].state is ServiceState.READY


async def request(layout: RunLayout, *arguments: object) -> list[tuple[str, str]]:
    reports = await asyncio.to_thread(lambda: list(request_services(layout.control_socket, *arguments)))
    return [(each.kind, each.service) for each in reports]


async def test_by_hand_a_stage_keeps_its_number(layout: RunLayout, gauges: Gauges) -> None:
    async with running(layout, gauges, *(encoder(number) for number in range(3))) as scaled:
        assert await request(layout, "scale", ("encoder",), Bounds(2, 2)) == [
            ("starting", "encoder-0"),
            ("starting", "encoder-1"),
            ("done", ""),
        ]
        assert scaled.num_ready() == 2
        gauges.waiting_s = 100.0
        seen = gauges.num_scrapes
        assert await request(layout, "scale", ("encoder",), Bounds(1, 1)) == [
            ("stopping", "encoder-1"),
            ("done", ""),
        ]
        assert (scaled.num_ready(), gauges.num_scrapes) == (1, seen), "a fixed number needs no gauges"
        await request(layout, "scale", ("encoder",), Bounds(0, 3))
        await until(lambda: scaled.num_ready() == 3)
        (failed,) = await request(layout, "scale", ("encoder",), Bounds(4, 4))
        assert failed[0] == "failed"


async def test_one_that_was_stopped_by_hand_starts_again_with_the_next_work(
    layout: RunLayout, gauges: Gauges
) -> None:
    async with running(layout, gauges, encoder(0), bounds=Bounds(0, 1)) as scaled:
        gauges.waiting_s = 1.0
        await until(lambda: scaled.num_ready() == 1)
        gauges.waiting_s = 0.0
        assert await request(layout, "stop", ("encoder-0",)) == [("stopping", "encoder-0"), ("done", "")]
        assert scaled.num_stopped() == 1
        gauges.waiting_s = 1.0
        await until(lambda: scaled.num_ready() == 1)


def test_signals_are_sums_over_gateways_and_of_the_own_role() -> None:
    prefill, decode = MODEL_GAUGES
    text = (
        f'{ENCODE_GAUGE}{{namespace="a"}} 1.0\n{ENCODE_GAUGE}{{namespace="b"}} 2.0\n'
        f'{prefill}{{model="m",role="prefill-decode"}} 3.0\n{prefill}{{model="m",role="prefill"}} 50.0\n'
        f'{decode}{{model="m",role="prefill-decode"}} 4.0\n'
    )
    signals = signals_of([text, text], 0.5)
    assert signals == {"encoder": StageSignal(6.0), "prefill_decode": StageSignal(8.0, 0.5)}
