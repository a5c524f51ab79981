"""Links and their transports: which one follows one that fails, and when a better one takes its place."""

import asyncio
from typing import Any, cast

import pytest

from triptych_common.domain.errors import MalformedMessageError
from triptych_common.protocol.messages import FabricEndpoint, FabricTransport, InstanceRecord, Role
from triptych_common.protocol.transfers import TransferFailureKind
from triptych_fabric.sender import links as links_module
from triptych_fabric.sender.link import OutgoingLink
from triptych_fabric.sender.links import AVOID_S, OutgoingLinks
from triptych_fabric.transports.transport import RateLimit
from triptych_fabric.wire.channel import ChannelClosedError
from triptych_fabric.wire.frames import EntryFailedError
from triptych_fabric.wire.handshake import LinkRefusedError, RefusalReason

TCP, NIXL = FabricTransport.TCP, FabricTransport.NIXL
BOTH = (NIXL, TCP)
TIMEOUT_S = 60.0
TARGET = "store-b"


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class FakeLink:
    """Open at once, unless its transport is one of `failing`."""

    failing: dict[FabricTransport, Exception] = {}  # noqa: RUF012 -- each test sets its own
    dialled: list[FabricTransport] = []  # noqa: RUF012 -- likewise

    def __init__(self, receiver: str, transport: Any, *arguments: Any) -> None:
        loop = asyncio.get_running_loop()
        self.receiver, self.transport = receiver, transport
        self.dialled.append(transport)
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.num_offers = 0
        self.is_lost = False
        self.retired = asyncio.Event()
        self._on_closed = arguments[4]
        self.is_open = transport not in self.failing
        if self.is_open:
            self.opened.set_result(None)
        else:
            self.opened.set_exception(self.failing[transport])

    def lose(self) -> None:
        self.is_open, self.is_lost = False, True
        self._on_closed(self)

    def close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
            self._on_closed(self)

    def close_when_idle(self) -> None:
        self.retired.set()


class Bench:
    """Links to one target, whose agent has all of `transports`."""

    def __init__(self, own: tuple[FabricTransport, ...]) -> None:
        self.boot_id = "first"
        nothing = cast(Any, None)
        self.links = OutgoingLinks(
            "store-a", self.find, cast(Any, {each: each for each in own}), nothing, RateLimit(None), TIMEOUT_S
        )  # fmt: skip

    async def find(self, target: str) -> InstanceRecord:
        endpoint = FabricEndpoint(host="10.0.0.1", port=7420, generation=1, transports=(TCP, NIXL))
        return InstanceRecord(
            instance="fabric-b", boot_id=self.boot_id, role=Role.FABRIC, store=target, fabric=endpoint
        )

    async def connected(self) -> FakeLink:
        link: OutgoingLink = await self.links.connected(TARGET)
        return cast(FakeLink, link)


async def no_connection(endpoint: FabricEndpoint) -> None: ...


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(links_module, "time", made)
    monkeypatch.setattr(links_module, "OutgoingLink", FakeLink)
    monkeypatch.setattr(links_module, "_connect", no_connection)
    monkeypatch.setattr(links_module, "FabricChannel", lambda sock: sock)
    monkeypatch.setattr(FakeLink, "failing", {})
    monkeypatch.setattr(FakeLink, "dialled", [])
    return made


async def test_one_that_does_not_come_about_is_followed_at_once() -> None:
    FakeLink.failing = {NIXL: ChannelClosedError("its NIXL failed")}
    bench = Bench(BOTH)
    assert (await bench.connected()).transport is TCP
    assert FakeLink.dialled == [NIXL, TCP]
    assert bench.links.transport_to(TARGET) is TCP


async def test_one_that_is_lost_is_followed_by_the_next_for_a_while(clock: Clock) -> None:
    """Then the better one is made beside it, and takes its place; what is under way stays."""
    bench = Bench(BOTH)
    (await bench.connected()).lose()
    assert bench.links.has_other_way(TARGET)
    by_tcp = await bench.connected()
    assert by_tcp.transport is TCP
    clock.now += AVOID_S - 1
    assert await bench.connected() is by_tcp
    clock.now += 1
    assert await bench.connected() is by_tcp, "nobody waits for the better one"
    await asyncio.wait_for(by_tcp.retired.wait(), TIMEOUT_S)
    assert (await bench.connected()).transport is NIXL
    assert FakeLink.dialled == [NIXL, TCP, NIXL]


async def test_a_better_one_that_fails_again_changes_nothing_for_a_while(clock: Clock) -> None:
    bench = Bench(BOTH)
    (await bench.connected()).lose()
    by_tcp = await bench.connected()
    FakeLink.failing = {NIXL: ChannelClosedError("still")}
    clock.now += AVOID_S
    await bench.connected()
    await asyncio.wait_for(bench.links._dialling[TARGET], TIMEOUT_S)
    assert await bench.connected() is by_tcp
    assert not by_tcp.retired.is_set()
    assert FakeLink.dialled == [NIXL, TCP, NIXL]


async def test_what_is_no_answer_at_the_start_is_a_failure_of_the_transport() -> None:
    """As a target's region that is too large for a frame."""
    FakeLink.failing = {NIXL: MalformedMessageError("too long")}
    assert (await Bench(BOTH).connected()).transport is TCP


async def test_entries_under_way_on_a_link_that_was_replaced_count(clock: Clock) -> None:
    bench = Bench(BOTH)
    (await bench.connected()).lose()
    by_tcp = await bench.connected()
    by_tcp.num_offers = 2
    clock.now += AVOID_S
    await bench.connected()
    await asyncio.wait_for(by_tcp.retired.wait(), TIMEOUT_S)
    (await bench.connected()).num_offers = 3
    assert bench.links.offers_by_receiver() == {TARGET: 5}


async def test_who_is_refused_tries_no_other_transport() -> None:
    """The key is the wrong one for each of them."""
    FakeLink.failing = {NIXL: LinkRefusedError("no", RefusalReason.KEY)}
    bench = Bench(BOTH)
    with pytest.raises(EntryFailedError) as caught:
        await bench.connected()
    assert caught.value.kind is TransferFailureKind.REFUSED
    assert FakeLink.dialled == [NIXL]
