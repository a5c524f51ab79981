"""Registration, heartbeats, and which process may remove a record."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.conftest import EmbeddedRedis
from tests.support.faults.tcp_proxy import proxy_to
from tests.support.waiting import until, until_async
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import MixedVersionsError
from triptych_common.protocol.messages import InstanceRecord, Role, ServingLoad
from triptych_common.protocol.names import StreamNames
from triptych_common.redis_client.commands import COMMAND_LIMIT_S

RECORD = InstanceRecord(
    instance="pd-0", boot_id="b-1", role=Role.PREFILL_DECODE, url="http://h:1", num_slots=4
)


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    async with await AsyncBus.connect(redis_url, "test", client_name="tests") as bus:
        yield Registry(bus)


async def test_registered_inside_gone_afterwards(registry: Registry) -> None:
    other = RECORD.model_copy(update={"instance": "encoder-0", "role": Role.ENCODE})
    async with registry.keep_registered(RECORD), registry.keep_registered(other):
        assert await registry.list_instances() == [other, RECORD]
    assert await registry.list_instances() == []


async def test_each_heartbeat_begins_the_time_to_live_anew(registry: Registry, raw: Any) -> None:
    async with registry.keep_registered(RECORD, interval_s=0.05, ttl_s=120.0):
        for _ in range(2):
            raw.expire("triptych:test:{instance}:pd-0", 60)
            await until(lambda: raw.ttl("triptych:test:{instance}:pd-0") > 60)
        assert await registry.list_instances() == [RECORD]


async def test_what_changes_all_the_time_is_read_for_each_heartbeat(registry: Registry) -> None:
    numbers = itertools.count(1)
    beats: asyncio.Queue[int] = asyncio.Queue()

    def read_fields() -> dict[str, Any]:
        beats.put_nowait(number := next(numbers))
        return {"load": ServingLoad(num_beats=number, num_running=number, num_waiting=0)}

    async with registry.keep_registered(RECORD, interval_s=0.02, read_fields=read_fields) as registration:
        (seen,) = await registry.list_instances()
        assert seen.load is not None, "from the first one on"
        async with asyncio.timeout(60):
            while await beats.get() < 4:
                pass
        (later,) = await registry.list_instances()
        assert later.load is not None
        assert later.load.num_running >= 3
        await registration.update(draining=True)
        (drained,) = await registry.list_instances()
        assert drained.draining
        assert drained.load is not None


async def test_one_fault_does_not_end_the_heartbeat(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The instance would go on, and never be chosen again, without a log line."""
    beats: asyncio.Queue[int] = asyncio.Queue()
    numbers = itertools.count(1)
    register = registry.register

    async def fail_once(record: InstanceRecord, **options: Any) -> str | None:
        beats.put_nowait(number := next(numbers))
        if number == 2:
            raise RuntimeError("a fault of the client's")
        return await register(record, **options)

    monkeypatch.setattr(registry, "register", fail_once)
    async with registry.keep_registered(RECORD, interval_s=0.02, ttl_s=60), asyncio.timeout(60):
        for _ in range(4):
            await beats.get()
    assert caplog.messages == ["heartbeat failed"]


async def test_a_heartbeat_whose_answer_is_lost_costs_no_place_in_the_registry(
    own_redis: EmbeddedRedis,
) -> None:
    """On the connection that it had there is no answer any more, and on a new one there is."""
    beats: asyncio.Queue[None] = asyncio.Queue()

    def read_fields() -> dict[str, Any]:
        beats.put_nowait(None)
        return {}

    with proxy_to(own_redis.socket_path) as proxy:
        async with await AsyncBus.connect(proxy.url, "test", client_name="tests") as bus:
            kept = Registry(bus).keep_registered(RECORD, interval_s=0.1, ttl_s=1.0, read_fields=read_fields)
            async with (
                await AsyncBus.connect(own_redis.url, "test", client_name="looks") as near,
                kept,
                asyncio.timeout(COMMAND_LIMIT_S - 1.0),
            ):
                await beats.get()
                proxy.mute_connections()
                for _ in range(10):
                    await beats.get()
                    assert await Registry(near).list_instances() == [RECORD]


async def test_another_connection_may_be_dead_as_the_first_one_is(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = itertools.count(1)
    register = registry.register

    async def hang_twice(record: InstanceRecord, **options: Any) -> str | None:
        if next(numbers) in (2, 3):  # the first one registers
            await asyncio.Event().wait()
        return await register(record, **options)

    monkeypatch.setattr(registry, "register", hang_twice)
    async with registry.keep_registered(RECORD, interval_s=60, ttl_s=0.4) as registration:
        async with asyncio.timeout(COMMAND_LIMIT_S):
            await registration.beat_in_time()
        assert next(numbers) == 5


async def test_dead_instance_disappears(registry: Registry, raw: Any) -> None:
    await registry.register(RECORD, ttl_s=120)
    assert await registry.list_instances() == [RECORD]
    await registry.register(RECORD, ttl_s=0.1)
    assert raw.pttl("triptych:test:{instance}:pd-0") in (-2, *range(101))  # -2: it is gone by now

    async def is_gone() -> bool:
        return not await registry.list_instances()

    await until_async(is_gone)


async def test_a_machine_whose_clock_is_hours_ahead_hides_no_instance(
    registry: Registry, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = RECORD.model_copy(update={"instance": "encoder-ahead"})
    now_s = time.time()
    await registry.register(RECORD)
    raw.zadd("triptych:test:{instance}s", {"long-gone": now_s - 7200})
    monkeypatch.setattr("triptych_common.coordination.registry.time.time", lambda: now_s + 7200)
    await registry.register(ahead)
    assert await registry.list_instances() == [ahead, RECORD]
    assert raw.zrange("triptych:test:{instance}s", 0, -1) == [
        b"pd-0",
        b"encoder-ahead",
    ]  # without those that are gone


async def test_draining_is_seen_at_once(registry: Registry) -> None:
    async with registry.keep_registered(RECORD) as registration:
        await registration.update(draining=True)
        (seen,) = await registry.list_instances()
        assert seen.draining


async def test_old_boot_does_not_remove_the_new_one(registry: Registry) -> None:
    new = RECORD.model_copy(update={"boot_id": "b-2"})
    async with registry.keep_registered(RECORD):
        await registry.register(new)
    assert await registry.list_instances() == [new]


async def test_records_that_cannot_be_read_are_left_out(registry: Registry, raw: Any) -> None:
    await registry.register(RECORD)
    raw.zadd("triptych:test:{instance}s", {"future": 9e9})
    raw.set("triptych:test:{instance}:future", b'{"v":2,"record":{}}')
    assert await registry.list_instances() == [RECORD]


async def test_two_processes_of_one_name_are_logged(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with registry.keep_registered(RECORD, interval_s=60) as registration:
        await registration.beat()
        assert caplog.messages == []
        await registry.register(RECORD.model_copy(update={"boot_id": "b-2"}))
        await registration.beat()
    assert caplog.messages == ["another process uses this instance's name"]


async def test_a_namespace_that_had_an_encoder(registry: Registry, raw: Any) -> None:
    """Its jobs stream says so, which outlives the encoder's record."""
    assert not await registry.had_encoder("f" * 64)
    raw.xgroup_create(StreamNames("test").encode_jobs("f" * 64), "encoders", mkstream=True)
    encoder = RECORD.model_copy(
        update={"instance": "encoder-0", "role": Role.ENCODE, "namespace_digest": "f" * 64}
    )
    async with registry.keep_registered(encoder):
        assert await registry.had_encoder("f" * 64)
    assert await registry.had_encoder("f" * 64)
    assert raw.pttl(StreamNames("test").encode_jobs("f" * 64)) > 0
    assert not await registry.had_encoder("e" * 64)


async def test_instances_of_another_schema_version_keep_a_service_from_starting(
    registry: Registry, raw: Any
) -> None:
    async with registry.keep_registered(RECORD):
        key = StreamNames("test").instance("pd-0")
        raw.set(key, raw.get(key).replace(b'"v":2', b'"v":3'))
        other = RECORD.model_copy(update={"instance": "pd-1"})
        with pytest.raises(MixedVersionsError, match="instances of another schema version: pd-0 speaks 3"):
            async with registry.keep_registered(other):
                pytest.fail("registered beside an instance that it does not understand")
        assert not raw.exists(StreamNames("test").instance("pd-1"))
    async with registry.keep_registered(other):
        assert await registry.list_instances() == [other]
