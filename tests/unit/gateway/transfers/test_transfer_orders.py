"""TransferOrders between messages that come in any order: what is ordered, and what is left alone."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.gateway.routing import record_of
from tests.support.gateway.transfer_world import S1, S2, TARGET, A, World, agent, running, wait_of
from tests.support.waiting import until
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import EncodeCompleted, FabricTransport, Role
from triptych_common.protocol.transfers import EntryPlace, TransferFailureKind
from triptych_gateway.transfers import transfer_trace
from triptych_gateway.transfers.transfer_orders import MAX_EXTENSIONS
from triptych_gateway.transfers.transfer_table import STALE_S, TransferState


@pytest.fixture
async def impatient() -> AsyncIterator[World]:
    """A silent agent is given up at once."""
    async with running(World(grace_s=0.05)) as opened:
        yield opened


async def test_the_timer_runs_from_the_seal(impatient: World) -> None:
    impatient.is_encoding = True
    with impatient.transfers.hold(wait_of()):
        impatient.announce(S1)
        await impatient.until_orders(1)
        assert impatient.transfer().due_at == float("inf")
        impatient.is_encoding = False
        impatient.places.note_sealed(A, "job-1")
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
    item_wait = wait_of()
    item_wait.deadline = time.monotonic()
    with impatient.transfers.hold(item_wait):
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
        under_way = world.transfers.table.bytes_under_way
        assert (under_way(S1, TARGET), under_way(S1, S2), under_way(S2, TARGET)) == (96, 0, 0)
        world.announce(S2)
        assert (await world.until_orders(2)).source == S2
        assert (under_way(S1, TARGET), under_way(S2, TARGET)) == (0, 96)
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


@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_report_after_the_answer_is_in_its_trace_and_counted(
    world: World, monkeypatch: pytest.MonkeyPatch, is_whole: bool
) -> None:
    shown: list[tuple[Any, ...]] = []

    def record(name: str, *_: int, traceparent: str | None, error: str | None, **rest: Any) -> None:
        shown.append((name, traceparent, error, rest["attributes"]["triptych.source"]))

    monkeypatch.setattr(transfer_trace, "record_span", record)
    first, second = wait_of("r-1"), wait_of("r-2")
    first.traceparent, second.traceparent = "of r-1", "of r-2"
    with world.transfers.hold(first), world.transfers.hold(second):
        world.announce(S1, sealed=True)
        order = await world.until_orders(1)
    for _ in range(2):  # told twice
        if is_whole:
            world.complete(order)
        else:
            world.fail(order, TransferFailureKind.CORRUPTED)
    error = None if is_whole else "corrupted"
    assert shown == [("gateway.transfer", each, error, S1) for each in ("of r-2", "of r-1")]
    results = world.metrics.transfers.labels(error or "completed")
    assert results._value.get() == 1


async def test_two_orders_of_one_item_are_counted_whichever_is_reported_first(world: World) -> None:
    with world.transfers.hold(wait_of("r-1")):
        world.announce(S1, sealed=True)
        first = await world.until_orders(1)
    with world.transfers.hold(wait_of("r-2")):
        world.announce(S1, sealed=True)
        second = await world.until_orders(2)
        world.complete(first)
        assert world.transfer().state is TransferState.HELD
        world.complete(second)
    assert world.metrics.transfers.labels("completed")._value.get() == 2


async def test_what_an_instance_lacks_that_the_request_has_left_is_not_missed_at_the_next(
    world: World,
) -> None:
    item_wait = wait_of()
    with world.transfers.hold(item_wait):
        world.announce(S2, sealed=True)
        await world.until_orders(1)
        await world.transfers.bring(item_wait, world.records[1])
        assert world.transfer(S2).state is TransferState.HELD
        assert world.need(), "of the first instance, late"
        assert world.transfer(S2).state is TransferState.HELD
        assert world.places.find(A) is not None


async def test_an_item_that_failed_and_is_asked_for_again_is_brought(world: World) -> None:
    """Nobody needed it at first; then its engine started over."""
    item_wait = wait_of()
    item_wait.on_answer_began()
    with world.transfers.hold(item_wait):
        for number in range(1, 4):
            world.announce(S1, sealed=True)
            world.fail(await world.until_orders(number), TransferFailureKind.TARGET_FULL)
        await until(lambda: world.transfer().state is TransferState.FAILED)
        assert world.need()
        world.complete(await world.until_orders(4))
        assert world.transfer().state is TransferState.HELD


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


async def test_a_writer_lost_where_agents_have_two_ways_is_left_to_them(world: World) -> None:
    """A link that was lost is followed by one of another transport, within the same order."""
    both = (FabricTransport.NIXL, FabricTransport.TCP)
    others = [each for each in world.records if each.role is not Role.FABRIC]
    world.records = (*others, agent(S1, transports=both), agent(TARGET, transports=both))
    with world.transfers.hold(wait_of()):
        world.announce(S1, sealed=True)
        order = await world.until_orders(1)
        assert world.need("writer_lost"), "it is on its way"
        assert world.transfers.table.ordered(order.transfer_id) is not None
        world.complete(order)
        assert world.transfer().state is TransferState.HELD
    assert not world.encoded_near


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
    item_wait = wait_of()
    with world.transfers.hold(item_wait):
        world.announce(S1, sealed=True)
        await world.until_orders(1)
        await world.transfers.bring(item_wait, world.records[1])
        assert (await world.until_orders(2)).target == S2
        world.fail(world.orders[0], TransferFailureKind.REFUSED)
        assert world.transfers.table.get(A, TARGET) is None
        item_wait.raise_failure()  # there is none
        await world.transfers.bring(item_wait, record_of("pd-2"))  # one without a store: it only decodes
        assert item_wait.target == S2, "new encodes of its items are near it"
        assert world.transfer(S2).state is TransferState.ORDERED


async def test_it_leaves_the_first_target_also_where_one_store_is_left(world: World) -> None:
    item_wait = wait_of()
    with world.transfers.hold(item_wait):
        world.announce(S1, sealed=True)
        await world.until_orders(1)
        world.records = (record_of("pd-1", store=S2), agent(S2))
        await world.transfers.bring(item_wait, world.records[0])
        assert world.transfers.table.get(A, TARGET) is None


async def test_the_directory_is_read_once_for_a_request(world: World) -> None:
    world.directory[A] = (EntryPlace(store=S1, generation=1, num_bytes=96),)
    item_wait = wait_of()
    item_wait.on_entries_read(await world.transfers.places.read([A]))
    with world.transfers.hold(item_wait):
        await world.transfers.bring(item_wait, world.records[0])
        assert (await world.until_orders(1)).source == S1
    assert world.num_reads == 1
    assert world.transfers.places.stores_of([A], item_wait.entry_places) == {S1: {A}}


async def test_every_request_that_waits_gets_the_error_and_none_that_needs_it_no_more(world: World) -> None:
    waits, settled = [wait_of("r-1"), wait_of("r-2")], wait_of("r-3")
    settled.on_answer_began()
    with world.transfers.hold(waits[0]), world.transfers.hold(waits[1]), world.transfers.hold(settled):
        for number in range(1, 4):
            world.announce(S1, sealed=True)
            world.fail(await world.until_orders(number), TransferFailureKind.TARGET_FULL)
        await until(lambda: world.transfer().state is TransferState.FAILED)
        for each in waits:
            with pytest.raises(RequestError) as caught:
                each.raise_failure()
            error = caught.value
            assert (error.status_code, error.code, error.param) == (503, "transfer_failed", "part 0")
        settled.raise_failure()  # there is none


def test_other_messages_are_not_its_own() -> None:
    completed = EncodeCompleted(job_id="job-1", mm_hash=A, encoder="encoder-0", encode_s=0.1)
    assert not World().transfers.on_result(completed)
