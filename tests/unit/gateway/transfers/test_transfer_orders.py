"""TransferOrders between messages that come in any order: what is ordered, and what is left alone."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from tests.support.gateway.routing import record_of
from tests.support.item_records import item_record
from tests.support.waiting import until
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import (
    EncodeCompleted,
    EncodeNeeded,
    EncoderCacheMetadata,
    FabricEndpoint,
    FabricTransport,
    InstanceRecord,
    Modality,
    Role,
)
from triptych_common.protocol.names import StreamNames
from triptych_common.protocol.transfers import (
    EntryPlace,
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.locality.item_places import ItemPlaces
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.media import TakenItem
from triptych_gateway.transfers.directory_notes import DirectoryNotes
from triptych_gateway.transfers.fabric_view import FabricView
from triptych_gateway.transfers.link_rates import LinkRates
from triptych_gateway.transfers.transfer_orders import MAX_EXTENSIONS, TransferLimits, TransferOrders
from triptych_gateway.transfers.transfer_table import STALE_S, Transfer, TransferState

A = MmHash("a" * 64)
TARGET, S1, S2 = "store-t", "store-1", "store-2"


def agent(store: str, boot_id: str = "b") -> InstanceRecord:
    endpoint = FabricEndpoint(host="10.0.0.1", port=7420, generation=1)
    return record_of(f"fabric-{store}", role=Role.FABRIC, store=store, fabric=endpoint, boot_id=boot_id)


@dataclass
class World:
    """Everything around it, faked; `orders` are those that were published, in order."""

    records: tuple[InstanceRecord, ...] = field(
        default_factory=lambda: (
            record_of("pd-0", store=TARGET), record_of("pd-1", store=S2), agent(S1), agent(S2), agent(TARGET),
        )
    )  # fmt: skip
    directory: dict[MmHash, tuple[EntryPlace, ...]] = field(default_factory=dict)
    orders: list[TransferOrder] = field(default_factory=list)
    encoded_near: list[str | None] = field(default_factory=list)
    is_encoding: bool = False
    num_reads: int = 0
    before_find: asyncio.Event | None = None
    grace_s: float = 60.0
    names: StreamNames = field(default_factory=lambda: StreamNames("test"))

    def __post_init__(self) -> None:
        self.fabric = FabricView(cast("Any", self))
        self.places = ItemPlaces(lambda: self.fabric.are_apart)
        self.sizes = SimpleNamespace(get_local=lambda mm_hash: None)
        self.table = SimpleNamespace(get=lambda mm_hash: SimpleNamespace(in_flight=self.is_encoding))
        self.transfers = TransferOrders(
            bus=cast("Any", self),
            gateway="gateway-0",
            fabric=self.fabric,
            orders=cast("Any", self),
            notes=DirectoryNotes(cast("Any", self), 5.0),
            rates=LinkRates(),
            limits=TransferLimits(max_attempts=3, grace_s=self.grace_s, publish_timeout_s=1.0),
            metrics=GatewayMetrics(),
        )

    def order_near(self, mm_hash: MmHash, store: str | None) -> None:
        self.encoded_near.append(store)

    async def publish(self, stream: str, message: TransferOrder, **_: Any) -> None:
        assert stream == self.names.transfers(f"fabric-{message.source}")
        self.orders.append(message)

    async def find(self, entries: Sequence[MmHash]) -> dict[MmHash, tuple[EntryPlace, ...]]:
        self.num_reads += 1
        if self.before_find is not None:
            await self.before_find.wait()
        return {each: self.directory[each] for each in entries if each in self.directory}

    async def add(self, noted: Any) -> None:
        for each in noted:
            self.directory[each.mm_hash] = (each.place,)

    async def remove(self, noted: Any) -> None:
        for each in noted:
            places = self.directory.get(each.mm_hash, ())
            self.directory[each.mm_hash] = tuple(old for old in places if old.store != each.place.store)

    # ---- what comes ------------------------------------------------------------------------------
    def announce(self, store: str, *, sealed: bool = False) -> None:
        self.places.note_metadata(
            EncoderCacheMetadata(
                job_id="job-1", mm_hash=A, modality=Modality.IMAGE, num_embeds=6, width=4, dtype="float32",
                num_bytes=96, record=item_record(6), encoder="encoder-0", store=store, sealed=sealed,
                requesters=(),
            )
        )  # fmt: skip

    def complete(self, order: TransferOrder) -> None:
        ends = order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})
        self.transfers.on_result(
            TransferCompleted(**ends, transport=FabricTransport.TCP, num_bytes=96, transfer_s=0.1)
        )

    def fail(self, order: TransferOrder, kind: TransferFailureKind) -> None:
        ends = order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})
        self.transfers.on_result(TransferFailed(**ends, kind=kind))

    def need(self, reason: Literal["absent", "writer_lost", "evicted"] = "absent") -> bool:
        return self.transfers.on_result(
            EncodeNeeded(request_id="r", item_index=0, mm_hash=A, prefill_decode="pd-0", reason=reason)
        )

    def transfer(self, target: str = TARGET) -> Transfer:
        found = self.transfers.table.get(A, target)
        assert found is not None
        return found

    async def until_orders(self, number: int) -> TransferOrder:
        await until(lambda: len(self.orders) == number)
        return self.orders[-1]


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(world.transfers.run())
        yield world
        task.cancel()


@pytest.fixture
async def impatient() -> AsyncIterator[World]:
    """A silent agent is given up at once."""
    async with running(World(grace_s=0.05)) as opened:
        yield opened


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running(World()) as opened:
        yield opened


def wait_of(request_id: str = "r") -> MediaWait:
    part = MediaPart(0, ("messages", 0, "content", 0), Modality.IMAGE, "", "part 0")
    item = TakenItem(part, A, b"x", None, {}, {})
    return MediaWait(RequestId(request_id), "pd-0", [item], time.monotonic() + 60, None, "d" * 64)


async def test_the_timer_runs_from_the_seal(impatient: World) -> None:
    impatient.is_encoding = True
    with impatient.transfers.hold(wait_of()):
        impatient.announce(S1)
        await impatient.until_orders(1)
        assert impatient.transfer().due_at == float("inf")
        impatient.is_encoding = False
        impatient.places.note_sealed(A)
        await until(lambda: impatient.transfer().failure == "silent")
    assert len(impatient.transfers.table) == 0


async def test_an_agent_that_lives_may_wait_for_room_for_some_time(impatient: World) -> None:
    impatient.is_encoding = True  # nothing else is tried meanwhile
    with impatient.transfers.hold(wait_of()):
        impatient.announce(S1, sealed=True)
        await impatient.until_orders(1)
        await until(lambda: impatient.transfer().num_extensions == MAX_EXTENSIONS)
        assert impatient.transfer().state is TransferState.ORDERED
        await until(lambda: impatient.transfer().failure == "silent")


async def test_it_waits_no_longer_than_the_requests_do(impatient: World) -> None:
    media_wait = wait_of()
    media_wait.deadline = time.monotonic()
    with impatient.transfers.hold(media_wait):
        impatient.announce(S1, sealed=True)
        await until(lambda: impatient.transfer().failure == "silent")
        assert impatient.transfer().num_extensions == 0


async def test_an_agent_that_is_gone_is_silent_the_first_time(impatient: World) -> None:
    impatient.is_encoding = True
    with impatient.transfers.hold(wait_of()):
        impatient.announce(S1, sealed=True)
        await impatient.until_orders(1)
        impatient.records = tuple(each for each in impatient.records if each.instance != f"fabric-{S1}")
        await until(lambda: impatient.transfer().failure == "silent")
        assert impatient.transfer().num_extensions == 0


@pytest.mark.parametrize("kind", TransferFailureKind)
async def test_which_failures_are_of_the_link(world: World, kind: TransferFailureKind) -> None:
    is_of_link = kind in (
        TransferFailureKind.UNREACHABLE, TransferFailureKind.REFUSED, TransferFailureKind.CORRUPTED
    )  # fmt: skip
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        world.fail(await world.until_orders(1), kind)
        assert world.transfers.rates.is_avoided((S1, TARGET), time.monotonic()) is is_of_link


async def test_an_encoder_that_takes_the_job_over_elsewhere_is_the_new_source(world: World) -> None:
    """Also where the first one's host is gone with its agent, which says nothing any more."""
    world.is_encoding = True
    with world.transfers.hold(wait_of()):
        world.announce(S1)
        assert (await world.until_orders(1)).source == S1
        world.announce(S2)
        assert (await world.until_orders(2)).source == S2
        world.announce(TARGET)
        await until(lambda: world.transfer().state is TransferState.HELD)
    assert len(world.orders) == 2


async def test_a_source_that_has_it_is_not_left_for_another_encode(world: World) -> None:
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        first = await world.until_orders(1)
        world.announce(S2)
        await until(lambda: not world.places._has_changed.is_set())
        assert world.transfers.table.ordered(first.transfer_id) is not None


async def test_a_late_word_of_a_silent_agent_still_counts(impatient: World) -> None:
    impatient.is_encoding = True  # nothing else is tried meanwhile
    with impatient.transfers.hold(wait_of()):
        impatient.announce(S1, sealed=True)
        order = await impatient.until_orders(1)
        await until(lambda: impatient.transfer().failure == "silent")
        impatient.complete(order)
        assert impatient.transfer().state is TransferState.HELD
    impatient.complete(order)  # nobody's any more
    assert len(impatient.transfers.table) == 0


async def test_what_prefill_decode_asks_for(world: World) -> None:
    with world.transfers.hold(wait_of()):
        assert not world.need(), "nobody has it: an encode"
        world.announce(S1, sealed=True)
        order = await world.until_orders(1)
        assert world.need(), "it is on its way"
        world.complete(order)
        assert world.need(), "evicted: once more from there"
        order = await world.until_orders(2)
        world.fail(order, TransferFailureKind.ABSENT)  # and there, too
        await until(lambda: world.encoded_near == [TARGET])
        assert not world.need()
    assert not world.need(), "its request has left"


async def test_a_late_writer_lost_of_the_first_attempt_does_not_fail_the_second(world: World) -> None:
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        world.fail(await world.until_orders(1), TransferFailureKind.UNREACHABLE)
        world.announce(S1, sealed=True)
        second = await world.until_orders(2)
        assert world.need("writer_lost"), "it is on its way"
        assert world.transfers.table.ordered(second.transfer_id) is not None
        world.transfer().ordered_at -= STALE_S
        assert world.need("writer_lost")
        assert world.transfers.table.ordered(second.transfer_id) is None


async def test_an_encoder_of_the_target_that_dies_is_no_failed_transfer(world: World) -> None:
    world.is_encoding = True
    with world.transfers.hold(wait_of()):
        world.announce(TARGET)
        await until(lambda: world.transfer().state is TransferState.HELD)
        assert not world.need("writer_lost"), "the job is checked as with one store"
        world.announce(S1)
        assert (await world.until_orders(1)).source == S1
        world.complete(world.orders[0])
        world.announce(TARGET)
        await until(lambda: not world.places._has_changed.is_set())
        world.announce(S2)  # the other way round: its new encoder is heard of first
        assert world.need("writer_lost")
        assert (await world.until_orders(2)).source == S2
    assert not world.encoded_near


async def test_a_request_that_goes_elsewhere_leaves_the_first_target(world: World) -> None:
    media_wait = wait_of()
    with world.transfers.hold(media_wait):
        world.announce(S1, sealed=True)
        await world.until_orders(1)
        await world.transfers.bring(media_wait, world.records[1])
        assert (await world.until_orders(2)).target == S2
        world.fail(world.orders[0], TransferFailureKind.REFUSED)
        assert world.transfers.table.get(A, TARGET) is None
        assert not media_wait.has_failed
        await world.transfers.bring(media_wait, record_of("pd-2"))  # one without a store: it only decodes
        assert media_wait.target == S2, "new encodes of its items are near it"
        assert world.transfer(S2).state is TransferState.ORDERED


async def test_it_leaves_the_first_target_also_where_one_store_is_left(world: World) -> None:
    media_wait = wait_of()
    with world.transfers.hold(media_wait):
        world.announce(S1, sealed=True)
        await world.until_orders(1)
        world.records = (record_of("pd-1", store=S2), agent(S2))
        await world.transfers.bring(media_wait, world.records[0])
        assert world.transfers.table.get(A, TARGET) is None


async def test_the_directory_is_read_once_for_a_request(world: World) -> None:
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    media_wait = wait_of()
    media_wait.entry_places.update(await world.transfers.places.read([A]))
    with world.transfers.hold(media_wait):
        await world.transfers.bring(media_wait, world.records[0])
        assert (await world.until_orders(1)).source == S1
    assert world.num_reads == 1
    assert world.transfers.places.stores_of([A], media_wait.entry_places) == {S1: {A}}


async def test_an_item_that_was_moved_meanwhile_is_encoded_nowhere_again(world: World) -> None:
    """The request read the directory before a drain moved its item; the first source has gone since."""
    media_wait = wait_of()
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    media_wait.entry_places.update(await world.transfers.places.read([A]))
    with world.transfers.hold(media_wait):
        world.records = tuple(each for each in world.records if each.store != S1)
        world.directory[A] = (EntryPlace(store=TARGET, generation=1, num_bytes=96),)
        world.announce(S1, sealed=True)  # what an encoder said before counts, too
        await until(lambda: world.transfer().state is TransferState.HELD)
    assert (world.orders, world.encoded_near) == ([], [])


async def test_what_is_asked_for_during_the_look_orders_no_encode(world: World) -> None:
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        order, answers = await world.until_orders(1), asyncio.Event()
        world.before_find = answers
        world.fail(order, TransferFailureKind.UNREACHABLE)
        await until(lambda: world.num_reads == 1)
        assert world.need(), "it is being looked for"
        answers.set()
        await until(lambda: world.encoded_near == [TARGET])


async def test_a_request_that_leaves_during_the_look_leaves_nothing(world: World) -> None:
    answers = world.before_find = asyncio.Event()
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        world.fail(await world.until_orders(1), TransferFailureKind.UNREACHABLE)
        await until(lambda: world.num_reads == 1)
    world.directory[A] = (EntryPlace(store=S2, generation=1, num_bytes=96),)
    answers.set()
    with world.transfers.hold(wait_of("r-2")):
        world.announce(S1, sealed=True)
        await world.until_orders(2)
    assert (len(world.transfers.table), world.transfers.table.num_ordered) == (0, 0)


async def test_what_one_request_has_read_long_ago_hides_nothing_of_another(world: World) -> None:
    early, late = wait_of("r-2"), wait_of("r-1")  # in the order in which they are asked
    early.entry_places[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    late.entry_places[A] = (EntryPlace(store=TARGET, generation=1, num_bytes=96),)
    with world.transfers.hold(early), world.transfers.hold(late):
        await world.transfers.bring(late, world.records[0])
        assert world.transfer().state is TransferState.HELD
    assert world.orders == []


async def test_an_item_without_any_place_is_looked_up_before_its_request_goes(world: World) -> None:
    """It is some time since the request came: it has waited for another item."""
    media_wait = wait_of()
    media_wait.entry_places.update(await world.transfers.places.read([A]))
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    with world.transfers.hold(media_wait):
        await world.transfers.bring(media_wait, world.records[0])
        assert (await world.until_orders(1)).source == S1


async def test_every_request_that_waits_gets_the_error_and_none_that_needs_it_no_more(world: World) -> None:
    waits, settled = [wait_of("r-1"), wait_of("r-2")], wait_of("r-3")
    settled.settle()
    with (
        world.transfers.hold(waits[0]),
        world.transfers.hold(waits[1]),
        world.transfers.hold(settled),
    ):
        for number in range(1, 4):
            world.announce(S1, sealed=True)
            world.fail(await world.until_orders(number), TransferFailureKind.TARGET_FULL)
        await until(lambda: world.transfer().state is TransferState.FAILED)
        for each in waits:
            with pytest.raises(RequestError) as caught:
                each.raise_failure()
            error = caught.value
            assert (error.status_code, error.code, error.param) == (503, "transfer_failed", "part 0")
        assert not settled.has_failed


async def test_where_one_store_is_left_nothing_is_done(world: World) -> None:
    world.records = (record_of("pd-0", store=TARGET), agent(TARGET))
    media_wait = wait_of()
    with world.transfers.hold(media_wait):
        world.announce(TARGET, sealed=True)
        await world.transfers.bring(media_wait, world.records[0])
        assert await world.transfers.places.read([A]) == {}
        assert (len(world.transfers.table), world.num_reads, world.orders) == (0, 0, [])
        assert not world.need()


def test_other_messages_are_not_its_own() -> None:
    completed = EncodeCompleted(job_id="job-1", mm_hash=A, encoder="encoder-0", encode_s=0.1)
    assert not World().transfers.on_result(completed)
