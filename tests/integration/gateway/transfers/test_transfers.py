"""Items in another store than where they are needed: a real gateway and Redis, fake stores and agents."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.gateway.fake_fabric import SILENT
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.hosts import (
    ANSWER,
    ENCODERS,
    OTHER,
    TARGET,
    Hosts,
    body,
    evict_at_target,
    opened_hosts,
    text_of,
    until_places,
)
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import another_gateway, opened_system
from tests.support.waiting import until
from triptych_common.coordination import EntryDirectory, NotedPlace
from triptych_common.domain.hashing import entry_hashes
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.transfers import EntryPlace, TransferFailureKind


@pytest.fixture
async def hosts(redis_url: str, tmp_path: Path) -> AsyncIterator[Hosts]:
    async with opened_hosts(redis_url, tmp_path) as opened:
        yield opened


# ---- a new item -----------------------------------------------------------------------------------
async def test_a_new_item_is_pushed_before_its_seal(hosts: Hosts) -> None:
    system, encoder = hosts.system, hosts.system.encoder
    encoder.before_seal.clear()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(system.post(body(1)))
        await until(lambda: hosts.source.orders)
        assert hosts.num_encodes == 0
        encoder.before_seal.set()
    assert text_of(asked.result()) == ANSWER
    (order,) = hosts.source.orders
    assert (order.source, order.target, order.gateway) == (ENCODERS, TARGET, "gateway-0")
    assert order.entries == (order.mm_hash,) == (encoder.jobs[0].mm_hash,)
    assert hosts.source.traceparents == [encoder.traceparents[0]]
    assert len(encoder.jobs) == 1, "what its prefill_decode asked for meanwhile started nothing"
    await until(lambda: not system.gateway.transfers.places.is_encoding(MmHash(order.mm_hash)))
    await until_places(hosts, order.mm_hash, {ENCODERS, TARGET})


async def test_two_requests_share_a_transfer(hosts: Hosts) -> None:
    hosts.source.before_push.clear()
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(hosts.system.post(body(1))) for _ in range(2)]
        await until(lambda: len(hosts.system.prefill_decode.bodies) == 2 and hosts.source.orders)
        num_orders = len(hosts.source.orders)
        hosts.source.before_push.set()
    assert [text_of(each.result()) for each in asked] == [ANSWER] * 2
    assert (num_orders, hosts.num_encodes) == (1, 1)


async def test_items_of_one_request_come_each_by_itself(hosts: Hosts) -> None:
    assert text_of(await hosts.system.post(body(1, 2, 3))).startswith("1x8x8 1x8x8 1x8x8")
    assert len({order.mm_hash for order in hosts.source.orders}) == 3
    assert hosts.num_encodes == 3


async def test_all_pieces_of_an_item_are_one_transfer(hosts: Hosts) -> None:
    hosts.system.encoder.pieces = 4
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    (order,) = hosts.source.orders
    assert order.entries == entry_hashes(MmHash(order.mm_hash), (16, 16, 16, 16))
    for entry in order.entries:
        await until_places(hosts, entry, {ENCODERS, TARGET})
    hosts.stores.held[TARGET].remove(order.entries[2])
    async with another_gateway(hosts.system, "gateway-1") as other:
        await other.refresh()
        assert text_of(await other.post(body(1))) == ANSWER
    assert hosts.source.orders[-1].entries == order.entries
    assert hosts.num_encodes == 1


# ---- one store ------------------------------------------------------------------------------------
async def test_where_one_store_is_registered_redis_hears_nothing_of_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one-host path: a new item, and one whose sizes are known."""

    def refuse(*_: Any) -> None:
        raise AssertionError("the directory was asked")

    for method in ("find", "add", "remove"):
        monkeypatch.setattr(EntryDirectory, method, refuse)
    async with opened_system(redis_url, tmp_path, FakePrefillDecode(store=ENCODERS)) as system:
        assert {each.store for each in system.gateway.view.records} >= {ENCODERS}
        for _ in range(2):
            assert text_of(await system.post(body(1))) == ANSWER
        await until(lambda: system.encoder.num_encodes)  # the answers need the sizes alone
        assert system.encoder.num_encodes == 1
        names = system.bus.names
        assert not await system.bus.client.exists(names.entries, names.entries_order)
        assert system.gateway.orders.places.find(MmHash(system.encoder.jobs[0].mm_hash)) is None
        assert len(system.gateway.transfers.table) == 0


# ---- an item that was encoded before --------------------------------------------------------------
async def test_an_item_that_the_target_has_is_not_sent_again(hosts: Hosts) -> None:
    for _ in range(2):
        assert text_of(await hosts.system.post(body(1))) == ANSWER
        await until_places(hosts, MmHash(hosts.source.orders[0].mm_hash), {ENCODERS, TARGET})
    assert (len(hosts.source.orders), hosts.num_encodes) == (1, 1)


async def test_an_item_that_was_evicted_at_the_target_is_sent_again(hosts: Hosts) -> None:
    await hosts.system.post(body(1))
    await evict_at_target(hosts)
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert (len(hosts.source.orders), len(hosts.system.encoder.jobs)) == (2, 1)


async def test_another_gateway_finds_it_in_the_directory(hosts: Hosts) -> None:
    await hosts.system.post(body(1))
    mm_hash = MmHash(hosts.source.orders[0].mm_hash)
    await until_places(hosts, mm_hash, {ENCODERS, TARGET})
    async with another_gateway(hosts.system, "gateway-1") as other:
        await other.refresh()
        assert text_of(await other.post(body(1))) == ANSWER
        assert len(hosts.source.orders) == 1, "the directory says that the target has it"
        place = EntryPlace(store=TARGET, generation=1, num_bytes=1)
        await hosts.directory.remove([NotedPlace(mm_hash, place)])
    hosts.stores.held[TARGET].clear()
    async with another_gateway(hosts.system, "gateway-2") as other:
        await other.refresh()
        assert text_of(await other.post(body(1))) == ANSWER
        assert other.gateway.orders.flight_requests.covers(mm_hash, {("r", 0)}) is False
    assert [each.gateway for each in hosts.source.orders] == ["gateway-0", "gateway-2"]
    assert len(hosts.system.encoder.jobs) == 1


async def test_places_of_a_life_that_has_ended_are_removed(hosts: Hosts) -> None:
    await hosts.system.post(body(1))
    mm_hash = MmHash(hosts.source.orders[0].mm_hash)
    await until_places(hosts, mm_hash, {ENCODERS, TARGET})
    for store in (ENCODERS, TARGET):
        place = EntryPlace(store=store, generation=9, num_bytes=1)
        await hosts.directory.add([NotedPlace(mm_hash, place)])
    hosts.stores.held[TARGET].clear()
    async with another_gateway(hosts.system, "gateway-1") as other:
        await other.refresh()
        assert text_of(await other.post(body(1))) == ANSWER
        await until_places(hosts, mm_hash, {ENCODERS, TARGET})
        found = (await hosts.directory.find([mm_hash]))[mm_hash]
    assert {each.generation for each in found} == {1}
    assert len(hosts.system.encoder.jobs) == 2, "no place was left: an encoder was asked, and had it"


# ---- what is seen of it ---------------------------------------------------------------------------
async def test_each_transfer_is_a_span_of_the_request_and_is_counted(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with exported_spans(monkeypatch) as exporter:
        async with opened_hosts(redis_url, tmp_path) as hosts:
            hosts.source.failures = [TransferFailureKind.CORRUPTED]
            assert text_of(await hosts.system.post(body(1))) == ANSWER
            metrics = (await hosts.system.http.get("/metrics")).text
        spans = exporter.get_finished_spans()
    failed, whole = (each for each in spans if each.name == "gateway.transfer")
    request = next(each for each in spans if each.name.startswith("chat"))
    assert {each.context.trace_id for each in (failed, whole)} == {request.context.trace_id}
    assert failed.status.description == "corrupted"
    ends = {"triptych.source": ENCODERS, "triptych.target": TARGET}
    assert whole.attributes is not None
    assert (
        whole.attributes.items()
        >= {
            **ends,
            "triptych.reason": "retry",
            "triptych.num_bytes": 4096,
            "triptych.bytes_per_s": 4_096_000,
            "triptych.transport": "tcp",
        }.items()
    )
    for series in (
        'transfers_ordered_total{reason="new"}',
        'transfers_ordered_total{reason="retry"}',
        'transfers_total{result="corrupted"}',
        'transfers_total{result="completed"}',
        "transfer_seconds_count",
    ):
        assert f"triptych_gateway_{series} 1.0" in metrics, series


# ---- the choice of an instance --------------------------------------------------------------------
async def test_the_instance_whose_store_has_the_items_is_chosen(hosts: Hosts) -> None:
    await hosts.system.post(body(1))
    mm_hash = MmHash(hosts.source.orders[0].mm_hash)
    near = await hosts.add_instance("pd-1", ENCODERS)
    await until_places(hosts, mm_hash, {ENCODERS, TARGET})
    async with another_gateway(hosts.system, "gateway-1") as other:  # which has sent nobody anything
        await other.refresh()
        place = EntryPlace(store=TARGET, generation=1, num_bytes=1)
        await hosts.directory.remove([NotedPlace(mm_hash, place)])
        for _ in range(3):
            assert text_of(await other.post(body(1))) == ANSWER
    assert len(near.bodies) == 3
    assert len(hosts.source.orders) == 1


# ---- a transfer that fails, in every way: it comes from elsewhere, or there is one error ---------
@pytest.mark.parametrize("kind", TransferFailureKind)
async def test_after_a_failure_it_comes_another_time(hosts: Hosts, kind: TransferFailureKind) -> None:
    hosts.source.failures = [kind]
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert len(hosts.source.orders) == 2
    assert hosts.source.orders[0].transfer_id != hosts.source.orders[1].transfer_id


async def test_without_another_source_it_is_encoded_again_near_the_target_and_then_anywhere(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, asked_near = hosts.system.gateway.orders, list[str | None]()
    order_near = orders.order_near

    def note(mm_hash: MmHash, store: str | None) -> None:
        asked_near.append(store)
        order_near(mm_hash, store)

    monkeypatch.setattr(orders, "order_near", note)
    await hosts.system.post(body(1))
    await evict_at_target(hosts)
    hosts.source.failures = [TransferFailureKind.UNREACHABLE] * 2
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert asked_near == [TARGET, None]
    assert (len(hosts.source.orders), hosts.num_encodes) == (4, 1)


async def test_when_no_attempt_is_left_the_request_fails_with_one_error(hosts: Hosts) -> None:
    hosts.source.failures = [TransferFailureKind.TARGET_FULL] * 3
    answer = await hosts.system.post(body(1))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "transfer_failed"
    assert "messages[0].content[0]" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert len(hosts.source.orders) == 3
    assert text_of(await hosts.system.post(body(1))) == ANSWER, "the next one begins anew"


async def test_without_an_agent_it_is_the_same_error(redis_url: str, tmp_path: Path) -> None:
    async with opened_hosts(redis_url, tmp_path, agents=()) as hosts:
        answer = await hosts.system.post(body(1))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "transfer_failed")
        await hosts.add_agent(ENCODERS)
        assert text_of(await hosts.system.post(body(1))) == ANSWER


async def test_an_agent_that_begins_another_life_gets_the_order_again(hosts: Hosts) -> None:
    hosts.source.failures = [SILENT]
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(hosts.system.post(body(1)))
        await until(lambda: hosts.source.orders)
        assert hosts.source.registration is not None
        await hosts.source.registration.update(boot_id="boot-2")
        await hosts.system.refresh()
    assert text_of(asked.result()) == ANSWER
    assert len(hosts.source.orders) == 2


async def test_a_request_that_goes_to_another_instance_has_its_items_brought_there(hosts: Hosts) -> None:
    other = await hosts.add_instance("pd-1", OTHER)
    hosts.system.prefill_decode.behaviour = "busy"  # 503: another one is tried
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert len(other.bodies) == 1
    assert hosts.source.orders[-1].target == OTHER


async def test_a_caller_that_leaves_takes_its_transfer_along(hosts: Hosts) -> None:
    hosts.source.failures = [SILENT]
    with pytest.raises(httpx.ReadTimeout):
        await hosts.system.http.post("/v1/chat/completions", json=body(1, stream=True), timeout=0.5)
