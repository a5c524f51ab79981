"""Every service is replaced under load, one after the other, by its next release, then by this one again.

No request fails, and nothing is encoded twice.
"""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import DEPLOYMENT, Layout
from tests.support.fast.processes.next_release import VERSION
from tests.support.fast.processes.tensors import png
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.fast.system import FastSystem
from tests.support.protocol_steps import Party
from triptych_common import release
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import StoreError

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

NUM_CALLERS = 6
LIMIT_S = 60.0
SHORT_TOKENS, LONG_TOKENS = 20, 250  # the long ones take longer than a server waits that does not drain
LAYOUT = Layout(
    num_encoders=2,
    num_prefill_decodes=2,
    num_gateways=2,
    token_s=0.01,
    encode_s=0.05,
    takeover_idle_ms=10_000,  # nothing dies: a takeover would be of one that gets no time
    drain_timeout_s=30.0,  # likewise, of answers that take longer on a busy machine
    first_token_timeout_s=30.0,
    options={Party.CACHE_STORE: ("--keep-region",), Party.GATEWAY: ("--drain-grace-s=2",)},
)


class Balancer:
    """In front of the gateways: takes the next one that is ready, another one if it refuses a connection."""

    def __init__(self, urls: list[str]) -> None:
        self._clients = [Client(url, CLIENT_LIMIT_S) for url in urls]
        self._ready = [True] * len(urls)
        self._urls = urls
        self._turns = itertools.count()

    async def ask(self, question: Question) -> Answer:
        turn = next(self._turns)
        inturn = [(turn + step) % len(self._clients) for step in range(len(self._clients))]
        for index in sorted(inturn, key=lambda index: not self._ready[index]):
            answer = await self._clients[index].ask(question)
            if not answer.fault.startswith("ConnectError"):
                break
        return answer

    async def check(self) -> None:
        """For ever."""
        async with httpx.AsyncClient(trust_env=False, timeout=2) as http:
            while True:
                for index, url in enumerate(self._urls):
                    self._ready[index] = await status(http, f"{url}/health/ready") == 200
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


async def status(http: httpx.AsyncClient, url: str) -> int:
    try:
        return (await http.get(url, headers={"Connection": "close"})).status_code
    except httpx.HTTPError:
        return 0


@asynccontextmanager
async def load(system: FastSystem) -> AsyncIterator[list[Answer]]:
    """Texts, and images that are new, until the block ends."""
    balancer = Balancer([system.url(name) for name in system.names_of(Party.GATEWAY)])
    answers: list[Answer] = []
    numbers = itertools.count(1)
    ended = asyncio.Event()

    async def call() -> None:
        while not ended.is_set():
            number = next(numbers)
            question = Question(
                f"number {number}",
                (png(number),) * (number % 3 > 0),
                num_tokens=LONG_TOKENS if number % 5 == 0 else SHORT_TOKENS,
                stream=number % 2 == 0,
            )
            answers.append(await balancer.ask(question))

    async with asyncio.TaskGroup() as group:
        checks = group.create_task(balancer.check())
        callers = [group.create_task(call()) for _ in range(NUM_CALLERS)]
        try:
            yield answers
        finally:
            ended.set()
            await asyncio.wait(callers)
            checks.cancel()
    await balancer.close()


async def replace(system: FastSystem, bus: AsyncBus, name: str) -> None:
    """SIGTERM, and wait until its successor is ready, by what a supervisor sees."""
    service = system.services[name]

    async def boot_id() -> str | None:
        records = await Registry(bus).list_instances()
        return next((each.boot_id for each in records if each.instance == name), None)

    before, restarts = await boot_id(), system.restarts[name]

    async def is_back() -> bool:
        if system.restarts[name] == restarts:
            return False
        if service.party is Party.CACHE_STORE:
            try:
                await asyncio.to_thread(system.store_stats)
            except StoreError:
                return False
            return True
        if service.party is Party.GATEWAY:
            async with httpx.AsyncClient(trust_env=False, timeout=2) as http:
                return await status(http, f"{system.url(name)}/health/ready") == 200
        return await boot_id() not in (None, before)

    service.send(signal.SIGTERM)
    async with asyncio.timeout(LIMIT_S):
        while not await is_back():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("system", [LAYOUT], indirect=True)
async def test_no_request_fails_while_releases_are_mixed(system: FastSystem) -> None:
    async with (
        await AsyncBus.connect(system.redis.url, DEPLOYMENT, client_name="test") as bus,
        load(system) as answers,
    ):
        for is_next, version in ((True, VERSION), (False, release())):
            for name, service in system.services.items():
                service.is_next_release = is_next
                num_before = len(answers)
                await replace(system, bus, name)
                async with asyncio.timeout(LIMIT_S):
                    while len(answers) < num_before + NUM_CALLERS:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            records = await Registry(bus).list_instances()
            assert {each.release for each in records} == {version}
    await asyncio.to_thread(system.wait_until_whole)
    await asyncio.to_thread(system.wait_until_idle)
    check(answers, more=system.log_ends())
    assert {code for _, code in system.exits} == {0}
    assert set(system.tally().num_encodes.values()) == {1}
