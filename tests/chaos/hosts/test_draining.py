"""A host is drained under load: no request fails, and what it had is encoded nowhere again.

The command does its work itself, on the stores and agents of the system; what it asks of a supervisor the
test does.
"""

import asyncio
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.support.fast.case import check
from tests.support.fast.client import Answer, Client, Question
from tests.support.fast.layout import DEPLOYMENT
from tests.support.fast.processes.tensors import png
from tests.support.fast.redis_inspection import registered_boots
from tests.support.fast.scenario import CLIENT_LIMIT_S
from tests.support.hosts.layout import HostsLayout, Place, agent_of, store_of
from tests.support.hosts.system import HostsSystem
from tests.support.waiting import until
from triptych_cli.commands.drain import empty_host
from triptych_cli.supervisor.state import HostStatus

LAYOUT = HostsLayout(
    places={
        "a": Place(num_encoders=1, num_prefill_decodes=1),
        "b": Place(num_encoders=1, num_prefill_decodes=1, num_gateways=1),
        "c": Place(num_prefill_decodes=1),
    },
    region_bytes=64 << 20,  # all that is asked about fits
)
FIRST = 80_000  # of the images: those of other files have other numbers
NUM_CALLERS = 6
SHARE_NEW = 0.1  # of the questions: with an image that nobody has asked about
END_LIMIT_S = 20.0
MOVE_LIMIT_S = 60.0

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.slow,
    pytest.mark.parametrize("system", [LAYOUT], indirect=True, ids=["three hosts"]),
]


class Callers:
    """Each asks one question after the other, with images that are known, and now and then a new one."""

    def __init__(self, url: str, first: int) -> None:
        self._client = Client(url, CLIENT_LIMIT_S)
        self._random = random.Random(first)
        self._next = first
        self.known: list[bytes] = []  # images that were answered once
        self.answers: list[Answer] = []

    async def ask_until(self, done: asyncio.Event) -> None:
        async with self._client, asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(self._ask_on(done))

    async def until_known(self, number: int) -> None:
        """So many images more were answered."""
        wanted = len(self.known) + number
        await until(lambda: len(self.known) >= wanted, CLIENT_LIMIT_S)

    async def _ask_on(self, done: asyncio.Event) -> None:
        while not done.is_set():
            is_new = self._random.random() < SHARE_NEW or len(self.known) < NUM_CALLERS
            new = [self._new_image()] if is_new else []
            # Behind another item than before none is in a KV cache: the store has to have it.
            old = self._random.sample(self.known, min(2, len(self.known)))
            images = (*old, *new)
            question = Question(f"question {self._random.random()}", images, len(images) + 4)
            self.answers.append(await self._client.ask(question))
            if self.answers[-1].is_right:
                self.known += new

    def _new_image(self) -> bytes:
        self._next += 1
        return png(self._next)


def end(system: HostsSystem, names: list[str]) -> list[str]:
    """As a supervisor ends instances; those that did not end by themselves, and well."""
    for name in names:
        system.hold_down(name)
        system.services[name].send(signal.SIGTERM)
    system.wait_until(
        lambda: all(system.services[name].exit_code is not None for name in names),
        END_LIMIT_S,
        f"{', '.join(names)} have ended",
    )
    return [name for name in names if system.services[name].exit_code != 0]


def drain(system: HostsSystem, host: str) -> int:
    """The exit code of the command."""
    last = [agent_of(host), store_of(host)]
    engines = [name for name in system.on_host(host) if name not in last]
    status = HostStatus(
        name=host, store=store_of(host), agent=agent_of(host), join_dir="", key_file=None, runs_redis=False
    )

    def stop_rest() -> list[str]:
        return [failed for name in last for failed in end(system, [name])]

    return empty_host(status, MOVE_LIMIT_S, lambda: not end(system, engines), stop_rest)


@contextmanager
def returning(system: HostsSystem, host: str) -> Iterator[None]:
    """Whatever the block has ended is there again afterwards."""
    try:
        yield
    finally:
        for name in sorted(system.on_host(host), key=lambda each: each != store_of(host)):
            system.let_up(name)
        system.wait_until_whole()


@pytest.fixture
def on_host(system: HostsSystem, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From now on commands are run on that host."""

    def be_on(host: str) -> None:
        monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(system.run_dir_of(store_of(host))))
        monkeypatch.setenv("TRIPTYCH_REDIS_URL", system.redis.url)
        monkeypatch.setenv("TRIPTYCH_DEPLOYMENT", DEPLOYMENT)

    return be_on


@pytest.mark.parametrize(
    ("hosts", "num_images"),
    [(("a",), 20), pytest.param(("a", "c", "a", "c", "a"), 60, marks=pytest.mark.long)],
    ids=["one", "one after the other"],
)
async def test_no_request_fails_and_nothing_is_encoded_again(
    system: HostsSystem, on_host: Callable[[str], None], hosts: tuple[str, ...], num_images: int
) -> None:
    callers, done = Callers(system.url(), FIRST + 1_000 * len(hosts)), asyncio.Event()
    before = system.tally()
    async with asyncio.TaskGroup() as group:
        group.create_task(callers.ask_until(done))
        for host in hosts:
            on_host(host)
            await callers.until_known(num_images)
            with returning(system, host):
                code = await asyncio.to_thread(drain, system, host)
                assert code == 0, system.log_ends()
                assert registered_boots(system.redis.url, system.on_host(host)) == {}
                await callers.until_known(num_images)
                callers.answers += await ask_again(system, list(callers.known))
        done.set()
    check(callers.answers, more=system.log_ends())
    num_encodes = system.tally().since(before).num_encodes
    assert len(num_encodes) >= len(callers.known)
    assert {mm_hash: number for mm_hash, number in num_encodes.items() if number > 1} == {}
    assert [system.store_stats(store).num_evictions_total for store in system.stores] == [0, 0, 0]
    await asyncio.to_thread(system.wait_until_idle)


async def ask_again(system: HostsSystem, images: list[bytes]) -> list[Answer]:
    """About all of them, each behind another one than before, a few at a time."""
    pairs, answers = iter(list(zip(images, reversed(images), strict=True))), list[Answer]()
    async with Client(system.url(), CLIENT_LIMIT_S) as client:

        async def ask_on() -> None:
            for pair in pairs:
                answers.append(await client.ask(Question("once more", pair)))

        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CALLERS):
                group.create_task(ask_on())
    return answers
