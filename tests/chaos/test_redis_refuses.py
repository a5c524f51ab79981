"""Redis refuses to work for a while: out of memory, another password, a primary that became a replica.

The whole system is under load meanwhile. No service ends, text is served, images are answered or get an
error that allows a retry, and afterwards nothing is left.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import embedded_redis
from tests.support.fast.case import CaseError, check, is_right_or_documented_error
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import Layout
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.fast.system import FastSystem
from tests.support.faults.redis_pair import Pair, raw, running_pair
from tests.support.faults.tcp_proxy import TcpProxy, proxy_to
from triptych_common.coordination.registry import TTL_S

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

FAULT_S = TTL_S + 1.0  # longer than a heartbeat lasts
LOAD_S = FAULT_S + 2.0
INTERVAL_S = 0.25


class Load:
    """A text and a new image every `INTERVAL_S`."""

    def __init__(self, system: FastSystem, first_color: int) -> None:
        self._system = system
        self._color = first_color
        self.texts: list[Answer] = []
        self.images: list[Answer] = []

    async def run(self, fault: Callable[[], None]) -> None:
        """For `LOAD_S`; `fault` runs on a thread of its own meanwhile, and ends before."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + LOAD_S
        async with Client(self._system.url(), CLIENT_LIMIT_S) as client, asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(fault))
            while loop.time() < ends_at:
                self._color += 1
                group.create_task(self._ask(client, self.texts, Question(f"text {self._color}")))
                image = Question(f"image {self._color}", (png(self._color),))
                group.create_task(self._ask(client, self.images, image))
                await asyncio.sleep(INTERVAL_S)

    async def _ask(self, client: Client, answers: list[Answer], question: Question) -> None:
        answers.append(await client.ask(question))


async def run_load(system: FastSystem, fault: Callable[[], None], first_color: int) -> Load:
    """See the module's docstring."""
    load = Load(system, first_color)
    await load.run(fault)
    check(load.texts, more=system.log_ends())
    check(load.images, is_right_or_documented_error, more=system.log_ends())
    if system.exits:
        raise CaseError(f"ended: {system.exits}\n{system.log_ends()}")
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)
    async with Client(system.url(), CLIENT_LIMIT_S) as client:
        after = await client.ask(Question("after", (png(first_color + 500),)))
    check([after], more=system.log_ends())
    await asyncio.to_thread(system.wait_until_idle)
    return load


@pytest.fixture
def own_system() -> Iterator[FastSystem]:
    with embedded_redis() as server, FastSystem(server, Layout()) as system:
        yield system


def wait(seconds: float) -> None:
    """On a fault's thread."""
    threading.Event().wait(seconds)


async def test_out_of_memory(own_system: FastSystem) -> None:
    def fault() -> None:
        with raw(own_system.redis) as client:
            client.config_set("maxmemory", "1")
            wait(FAULT_S)
            client.config_set("maxmemory", "0")

    load = await run_load(own_system, fault, 1000)
    assert "bus_unavailable" in {answer.code for answer in load.images}


async def test_another_password(own_system: FastSystem) -> None:
    def fault() -> None:
        with raw(own_system.redis) as client:
            client.config_set("requirepass", "another")
            client.client_kill_filter(_type="normal", skipme=True)
            wait(3.0)
            client.config_set("requirepass", "")

    await run_load(own_system, fault, 2000)


class Address:
    """What services know: it leads to the primary, and is turned with it."""

    def __init__(self, pair: Pair, proxy: TcpProxy) -> None:
        self._pair = pair
        self._proxy = proxy
        self.url = proxy.url

    def fail_over(self) -> None:
        self._pair.fail_over()
        self._proxy.turn_to(self._pair.primary.port)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...


async def test_failover() -> None:
    with running_pair() as pair, proxy_to(pair.primary.port) as proxy:
        address = Address(pair, proxy)
        with FastSystem(address, Layout()) as system:

            def fault() -> None:
                wait(1.0)
                address.fail_over()

            load = await run_load(system, fault, 3000)
            check(load.images, more=system.log_ends())
