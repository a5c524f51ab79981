"""Where an item is, is looked up once more before it is encoded again, or goes without a source."""

import asyncio

from tests.support.gateway.transfer_world import S1, S2, TARGET, A, World, wait_of
from tests.support.waiting import until
from triptych_common.protocol.transfers import EntryPlace, TransferFailureKind
from triptych_gateway.transfers.transfer_table import TransferState


async def test_an_item_that_was_moved_meanwhile_is_encoded_nowhere_again(world: World) -> None:
    """The request read the directory before a drain moved its item; the first source has gone since."""
    item_wait = wait_of()
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    item_wait.on_entries_read(await world.transfers.places.read([A]))
    with world.transfers.hold(item_wait):
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
    item_wait = wait_of()
    item_wait.on_entries_read(await world.transfers.places.read([A]))
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    with world.transfers.hold(item_wait):
        await world.transfers.bring(item_wait, world.records[0])
        assert (await world.until_orders(1)).source == S1


async def test_what_the_target_has_said_to_lack_is_not_held_for_the_directory(world: World) -> None:
    """The note of an earlier transfer is late: it was evicted there since, and nobody asks once more."""
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        order = await world.until_orders(1)
        assert world.need(), "it is on its way"
        world.directory[A] = (EntryPlace(store=TARGET, generation=1, num_bytes=96),)
        world.fail(order, TransferFailureKind.UNREACHABLE)
        await until(lambda: world.encoded_near == [TARGET])
        world.announce(S1, sealed=True)
        world.complete(await world.until_orders(2))
        assert world.transfer().state is TransferState.HELD
        assert not world.transfer().is_missed


async def test_what_nobody_needs_is_not_looked_up_until_somebody_does(world: World) -> None:
    """The prompt was in a KV cache; then a request comes that knows another place."""
    settled, other = wait_of("r-1"), wait_of()
    settled.on_answer_began()
    with world.transfers.hold(settled), world.transfers.hold(other):
        other.on_answer_began()
        world.announce(S1, sealed=True)
        world.fail(await world.until_orders(1), TransferFailureKind.ABSENT)
        await until(lambda: world.transfer().due_at == float("inf"))
        assert world.num_reads == 0
        other.entry_places[A] = (EntryPlace(store=S2, generation=1, num_bytes=96),)
        assert world.need()
        assert (await world.until_orders(2)).source == S2
    assert world.encoded_near == []
