"""The list of rights is complete and minimal: a user with exactly these does everything, and uses each."""

import asyncio
import hashlib
import importlib
import pkgutil
import queue
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

import triptych_common
from tests.conftest import EmbeddedRedis, embedded_redis
from tests.integration.common.flight_samples import DIGEST, HASH, METADATA, claim, job_for, requester_at
from tests.integration.common.samples import LIMIT_S, STREAM, ids, message, take, take_queued
from triptych_common.bus import AsyncBus, ThreadedBus, drop_idle_consumers
from triptych_common.bus.inspection import delete_deployment, list_lags, peek
from triptych_common.coordination import (
    BlobStore,
    EntryDirectory,
    ItemNames,
    JobOffer,
    NotedPlace,
    RateCharge,
    Registry,
    RequestCounts,
    SharedSizes,
    SingleFlight,
)
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError
from triptych_common.protocol.codec import Envelope
from triptych_common.protocol.messages import EncodeFailed, FailureKind, InstanceRecord, Role
from triptych_common.protocol.names import DEFAULT_STORE, ENCODERS_GROUP
from triptych_common.protocol.transfers import EntryPlace
from triptych_common.redis_client.rights import RIGHTS, Right, rules
from triptych_common.redis_client.scripts import LuaScript

PASSWORD = "open-sesame"
GATEWAY = requester_at("gateway-0")
JOB = job_for(GATEWAY)
WITH_SUBCOMMANDS = {right.command.split("|")[0] for right in RIGHTS if "|" in right.command}
NEED_NO_RIGHT = {"auth"}
OF_OTHERS = {"cluster|slots", "multi", "exec"}  # of clusters; of the check itself
END = "end-of-test"


@pytest.fixture
def raw(own_redis: EmbeddedRedis) -> Iterator[Any]:
    with redis.Redis.from_url(own_redis.url, decode_responses=True) as client:
        yield client


def add_user(raw: Any, *given: str) -> None:
    raw.execute_command("ACL", "SETUSER", "triptych", "reset", "on", f">{PASSWORD}", *given)


def url_of(server: EmbeddedRedis, database: int = 1) -> str:
    return f"{server.url.replace('unix://', f'unix://triptych:{PASSWORD}@')}?db={database}"


def all_scripts() -> dict[str, str]:
    """By name, every Lua script of the package, as Redis gets it."""
    found: dict[str, str] = {}
    for each in pkgutil.walk_packages(triptych_common.__path__, "triptych_common."):
        if each.name.startswith(
            ("triptych_common.bus", "triptych_common.coordination", "triptych_common.redis_")
        ):
            values = vars(importlib.import_module(each.name)).values()
            found |= {value.name: value.text for value in values if isinstance(value, LuaScript)}
    files = {path.stem for path in Path(triptych_common.__path__[0]).rglob("*.lua")}
    assert found.keys() == files - {"flight", "backlog", "leaky_bucket", "bounded_hash"}  # those begin others
    return found


def command_of(words: list[str]) -> str:
    first = words[0].lower()
    return f"{first}|{words[1].lower()}" if first in WITH_SUBCOMMANDS else first


@contextmanager
def watched(raw: Any, server: EmbeddedRedis) -> Iterator[set[str]]:
    """Names of the commands that any client sends until the end of the block, also from scripts."""
    seen: set[str] = set()
    is_watching = threading.Event()

    def watch() -> None:
        with redis.Redis.from_url(server.url) as client, client.monitor() as monitor:
            is_watching.set()
            for each in monitor.listen():
                words = each["command"].split(" ")
                if words[-1] == END:
                    return
                seen.add(command_of(words))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert is_watching.wait(LIMIT_S)
    yield seen
    raw.echo(END)
    watcher.join(LIMIT_S)
    assert not watcher.is_alive()


# ---- every operation -----------------------------------------------------------------------------
async def use_streams(bus: AsyncBus) -> None:
    """Read, ack one and many, reject, hand back, take over, renew; an entry whose content is gone."""
    async with bus.consumer(STREAM, group="g", consumer="a", prefetch=4) as first:
        for number in range(6):
            await bus.publish(STREAM, message(number))
        taken = [await anext(first) for _ in range(4)]
        await taken[0].ack()
        taken[1].ack_soon()
        await taken[2].reject("for the test")
        await taken[3].hand_back()
        vanished, abandoned = await anext(first), await anext(first)
        await bus.client.xdel(STREAM, vanished.entry_id)
    second = bus.consumer(STREAM, group="g", consumer="b", prefetch=4, min_idle_ms=60, max_deliveries=9)
    async with second, asyncio.timeout(LIMIT_S):
        again = {(await anext(second)).entry_id for _ in range(2)}
        assert again == {taken[3].entry_id, abandoned.entry_id}
        renewed = asyncio.Event()
        renew = second._group.renew

        async def note(holding: Any) -> None:
            await renew(holding)
            renewed.set()

        second._group.renew = note  # type: ignore[assignment, method-assign]
        await renewed.wait()


async def use_jobs(bus: AsyncBus, flights: SingleFlight) -> None:
    """One flight that fails, one that is finished, one that all requesters leave."""
    stream = bus.names.encode_jobs(DIGEST)
    others = [requester_at(f"gateway-{number}") for number in range(1, 3)]
    failure = EncodeFailed(
        job_id="job-1", mm_hash=HASH, encoder="e", kind=FailureKind.ENCODER_ERROR, detail="x"
    )
    consumer = bus.consumer(stream, group=ENCODERS_GROUP, consumer="e", prefetch=4, min_idle_ms=60_000)
    async with consumer, asyncio.timeout(LIMIT_S):
        for is_failing in (True, False):
            await claim(flights, GATEWAY, "new", ttl_s=9, max_attempts=9)
            entry_id = await flights.publish_job(JobOffer(JOB, remaining_ms=1000, blob=b"media"))
            assert entry_id is not None
            await claim(flights, others[0], "check", ttl_s=9, max_attempts=9)
            assert (await flights.read_backlogs(DIGEST))[DEFAULT_STORE] >= (1, 0.0)
            delivery = await anext(consumer)
            await flights.start_job(JOB, entry_id, "e", lease_s=9, ttl_s=9)
            assert await flights.renew_job(
                HASH, "job-1", entry_id, "e", lease_s=9, stream=stream, namespace_digest=DIGEST
            )
            await flights.announce_metadata(METADATA, namespace_digest=DIGEST)
            if is_failing:
                assert await flights.fail_flight(failure, namespace_digest=DIGEST)
            else:
                assert await flights.finish_flight(METADATA, [], namespace_digest=DIGEST)
                requesters = [(each.request_id, 0) for each in (GATEWAY, *others)]
                assert (await flights.finish_flight(METADATA, requesters, namespace_digest=DIGEST))[0]
            await delivery.ack()
    await claim(flights, GATEWAY, "new", ttl_s=9, max_attempts=9)
    await flights.publish_job(JobOffer(JOB, spare_after_ms=0))
    async with bus.consumer(stream, group=ENCODERS_GROUP, consumer="far") as far:
        spare = await far.take_spare({"e": 0})
        assert spare is not None
        await spare.ack()
    left = [(each.request_id, 0) for each in (GATEWAY, *others)]
    assert await flights.leave_flight(HASH, left, namespace_digest=DIGEST)
    assert await drop_idle_consumers(bus, stream, ENCODERS_GROUP, idle_ms=0) == 2


async def use_registry(bus: AsyncBus) -> None:
    registry = Registry(bus)
    record = InstanceRecord(instance="e", boot_id="b", role=Role.ENCODE, namespace_digest=DIGEST)
    await bus.client.zadd(bus.names.instances, {"long-gone": 1.0})
    async with registry.keep_registered(record) as registration:
        await registration.update(draining=True)
        assert [each.instance for each in await registry.list_instances()] == ["e"]
        await registry._renew(record, 1.0)  # as while Redis is out of memory
    await bus.publish(bus.names.acks("e"), message(1))
    await registry.clear_inboxes("e")


async def use_sizes(bus: AsyncBus) -> None:
    sizes = SharedSizes(bus, max_items=2, ttl_s=60)
    for number in range(4):
        assert await sizes.set(f"{number:064x}", b"{}")
    assert [await sizes.get(f"{number:064x}") for number in range(4)] == [None, None, b"{}", b"{}"]


async def use_item_names(bus: AsyncBus) -> None:
    names = ItemNames(bus)
    sent = [(f"{number:064x}", b"{%d}" % number) for number in range(4)]
    first, *rest = [digest for digest, _ in sent]
    assert await names.exchange("owner", [(first, None), *sent, (first, None)]) == [None] * 5 + [b"{0}"]
    assert await names.exchange("owner", [(each, None) for each in rest]) == [b"{1}", b"{2}", b"{3}"]
    assert await names.exchange("other", [(first, None)]) == [None]


async def use_directory(bus: AsyncBus) -> None:
    directory = EntryDirectory(bus, max_items=2, ttl_s=60)
    noted = NotedPlace(HASH, EntryPlace(store="store-0", generation=1, num_bytes=1))
    await directory.add([noted])
    assert await directory.find([HASH]) == {HASH: (noted.place,)}
    await directory.remove([noted])


async def use_limits(bus: AsyncBus) -> None:
    """One request that passes, one that is refused, one that takes the place of a gateway that is gone."""
    counts, charge = RequestCounts(bus), RateCharge("requests", 1, 1)
    for place, is_counted in (("first", True), ("second", False)):
        counted = await counts.count_request("k", [charge], place=place, max_places=1, lease_s=9, now_us=1)
        assert (counted.reached is None) == is_counted
    await counts.renew_places("k", ["first"], lease_s=9, now_us=1)
    counted = await counts.count_request("k", [], place="third", max_places=1, lease_s=9)
    assert counted.reached is None
    await counts.settle_requests("k", [charge], ["third"])


def use_blobs(url: str) -> None:
    with closing(BlobStore(url, "test", client_name="tests")) as blobs:
        blobs.put("place", memoryview(b"tensor"))
        assert blobs.get("place", 6) == b"tensor"
        assert blobs.renew_tensor("place", 6)


def use_threads(url: str) -> None:
    received: queue.Queue[Envelope] = queue.Queue()
    with closing(ThreadedBus(url, "test", client_name="tests")) as threaded:
        threaded.subscribe("triptych:test:acks:t", group="g", consumer="c", callback=received.put)
        threaded.publish("triptych:test:acks:t", message(1))
        assert take_queued(received, 1) == ids(1)


async def use_tools(bus: AsyncBus) -> None:
    assert await list_lags(bus)
    assert await peek(bus, "dead-letters", 3)
    assert await delete_deployment(bus)


async def use_everything(bus: AsyncBus, url: str) -> None:
    """Send every command that a service sends."""
    await use_streams(bus)
    await use_jobs(bus, SingleFlight(bus))
    await use_registry(bus)
    await use_sizes(bus)
    await use_item_names(bus)
    await use_directory(bus)
    await use_limits(bus)
    await asyncio.to_thread(use_blobs, url)
    await asyncio.to_thread(use_threads, url)
    await use_tools(bus)


async def test_a_user_with_exactly_these_does_everything_and_uses_each(
    own_redis: EmbeddedRedis, raw: Any
) -> None:
    add_user(raw, *rules("test"))
    raw.config_resetstat()
    url = url_of(own_redis)
    with watched(raw, own_redis) as used:
        async with await AsyncBus.connect(url, "test", client_name="tests") as bus:
            await use_everything(bus, url)
    if {"cmdstat_client", "cmdstat_client|setname"} & raw.info("commandstats").keys():
        used.add("client|setname")  # of no interest to MONITOR
    assert raw.execute_command("ACL", "LOG") == []
    used -= NEED_NO_RIGHT
    listed = {right.command for right in RIGHTS} - OF_OTHERS
    assert (used - OF_OTHERS - listed, listed - used) == (set(), set())
    scripts = all_scripts()
    shas = [hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest() for text in scripts.values()]
    not_run = [n for n, was_run in zip(scripts, raw.script_exists(*shas), strict=True) if not was_run]
    assert not_run == []


def test_scripts_call_nothing_else() -> None:
    """Also where no test takes them."""
    called: set[str] = set()
    for text in all_scripts().values():
        for first, second in re.findall(r"redis\.p?call\('(\w+)'(?:, '(\w+)')?", text):
            called.add(command_of([first, second]))
    assert called
    assert called <= {right.command for right in RIGHTS}


# ---- the check at a start ------------------------------------------------------------------------
@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: right.command)
async def test_a_start_names_the_right_that_is_missing(redis_url: str, right: Right) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as raw:
        add_user(raw, *(rule for rule in rules("test") if rule != f"+{right.command}"))
        try:
            url = redis_url.replace("://", f"://triptych:{PASSWORD}@")
            if right.without:
                async with await AsyncBus.connect(url, "test", client_name="tests") as bus:
                    assert await bus.check() == (right,)
            else:
                with pytest.raises(
                    BusRefusedError, match="the user of TRIPTYCH_REDIS_URL lacks a right"
                ) as caught:
                    await AsyncBus.connect(url, "test", client_name="tests")
                assert right.command.split("|")[0] in str(caught.value)
            assert raw.dbsize() == 0  # nothing was run
        finally:
            raw.execute_command("ACL", "DELUSER", "triptych")


async def test_a_start_names_all_that_are_missing(own_redis: EmbeddedRedis, raw: Any) -> None:
    """As an earlier version's documents had it."""
    add_user(
        raw, "~triptych:test:*", "+@read", "+@write", "+@stream", "+@connection", "+@transaction", "+eval",
        "+info", "+time", "+client|setname",
    )  # fmt: skip
    with pytest.raises(BusRefusedError, match=r"lacks a right: \+evalsha \+script\|load$"):
        await AsyncBus.connect(url_of(own_redis, 0), "test", client_name="tests")


async def test_a_start_names_the_keys(own_redis: EmbeddedRedis, raw: Any) -> None:
    add_user(raw, *rules("other"))
    with pytest.raises(BusRefusedError, match=r"lacks a right: ~triptych:test:\*$"):
        await AsyncBus.connect(url_of(own_redis), "test", client_name="tests")


async def test_a_full_redis_is_no_question_of_rights(own_redis: EmbeddedRedis, raw: Any) -> None:
    add_user(raw, *rules("test"))
    raw.config_set("maxmemory", "1")
    async with await AsyncBus.connect(url_of(own_redis), "test", client_name="tests") as bus:
        assert await bus.check() == ()


async def test_without_transactions_nothing_is_tried() -> None:
    with embedded_redis("--rename-command", "MULTI", "") as server:
        with pytest.raises(BusUnavailableError, match="unknown command"):
            await AsyncBus.connect(server.url, "test", client_name="tests")
        with redis.Redis.from_url(server.url) as client:
            assert client.dbsize() == 0


async def test_the_check_runs_nothing(own_redis: EmbeddedRedis, raw: Any) -> None:
    add_user(raw, *rules("test"))
    async with await AsyncBus.connect(url_of(own_redis), "test", client_name="tests") as bus:
        await bus.publish(STREAM, message(1))
        await bus.check()
        async with bus.consumer(STREAM, group="g", consumer="c") as consumer:
            assert await take(consumer, 1) == ids(1)
    with redis.Redis.from_url(f"{own_redis.url}?db=1", decode_responses=True) as database:
        assert database.keys() == [STREAM]
