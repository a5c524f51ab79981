"""A transfer that fails, in every way: it comes from elsewhere, or there is one error."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.fake_fabric import SILENT
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
)
from tests.support.waiting import until
from triptych_common.coordination import NotedPlace
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeNeeded
from triptych_common.protocol.transfers import EntryPlace, TransferFailureKind


@pytest.mark.parametrize("kind", TransferFailureKind)
async def test_after_a_failure_it_comes_another_time(hosts: Hosts, kind: TransferFailureKind) -> None:
    hosts.source.failures = [kind]
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert len(hosts.source.orders) == 2
    assert hosts.source.orders[0].transfer_id != hosts.source.orders[1].transfer_id


async def test_after_a_failure_another_store_that_has_it_comes_first(hosts: Hosts) -> None:
    third = await hosts.add_agent(OTHER)
    await hosts.system.post(body(1))
    mm_hash = MmHash(hosts.source.orders[0].mm_hash)
    hosts.stores.held[OTHER].add(mm_hash)
    await hosts.directory.add([NotedPlace(mm_hash, EntryPlace(store=OTHER, generation=1, num_bytes=1))])
    await evict_at_target(hosts)
    hosts.source.failures = third.failures = [TransferFailureKind.UNREACHABLE]
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert len(hosts.source.orders) + len(third.orders) == 3
    assert len(third.orders) == 1
    assert len(hosts.system.encoder.jobs) == 1, "no encoder was asked"


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


async def test_an_encoder_of_the_target_ends_the_transfer(hosts: Hosts) -> None:
    """The item is made there, and nothing is pushed any more."""
    encoder = hosts.system.encoder
    await hosts.system.post(body(1))
    await evict_at_target(hosts)
    encoder.store, encoder.sealed = TARGET, hosts.stores.held[TARGET]  # of another one, as it were
    hosts.source.failures = [TransferFailureKind.UNREACHABLE]
    assert text_of(await hosts.system.post(body(1))) == ANSWER
    assert (len(hosts.source.orders), hosts.num_encodes) == (2, 2)


async def test_an_agent_that_is_silent_is_not_waited_for(redis_url: str, tmp_path: Path) -> None:
    async with opened_hosts(redis_url, tmp_path, transfer_grace_s=0.1) as hosts:
        hosts.source.failures = [SILENT]
        assert text_of(await hosts.system.post(body(1))) == ANSWER
        assert len(hosts.source.orders) == 2


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


async def test_a_reservation_that_was_lost_at_the_target_is_a_failure(hosts: Hosts) -> None:
    hosts.source.before_push.clear()
    hosts.source.failures = [SILENT]
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(hosts.system.post(body(1)))
        await until(lambda: hosts.system.prefill_decode.bodies)
        params = hosts.system.prefill_decode.bodies[0]["ec_transfer_params"]
        needed = EncodeNeeded(
            request_id=params["request_id"],
            item_index=0,
            mm_hash=params["items"][0]["mm_hash"],
            prefill_decode="pd-0",
            reason="writer_lost",
        )
        await hosts.system.bus.publish(hosts.system.bus.names.encode_results("gateway-0"), needed)
        await until(lambda: len(hosts.source.orders) == 2)
        hosts.source.before_push.set()
    assert text_of(asked.result()) == ANSWER


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
