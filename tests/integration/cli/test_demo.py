"""`demo` and `up` with a Redis that they did not start; of `demo` nothing stays there, however it ends."""

import asyncio
from pathlib import Path

import pytest

from triptych_cli.commands import demo
from triptych_cli.supervisor.launch import Launch
from triptych_cli.system.layout import RunLayout
from triptych_cli.system.preflight import check_redis
from triptych_cli.system.resolved_options import ResolvedOptions
from triptych_common.bus import AsyncBus
from triptych_common.bus.inspection import delete_deployment
from triptych_common.coordination import SharedSizes


@pytest.mark.parametrize("end", [asyncio.CancelledError, demo.DemoFailedError])
async def test_its_keys_are_deleted_when_it_fails(
    end: type[BaseException], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ResolvedOptions("m", False, 1, redis_url=redis_url, deployment="demo-test")

    async def publishes_and_ends(*_: object) -> None:
        async with await AsyncBus.connect(redis_url, "demo-test", client_name="test") as bus:
            await SharedSizes(bus, max_items=10, ttl_s=60).set("0" * 64, b"{}")
        raise end

    monkeypatch.setattr(demo, "_run_system", publishes_and_ends)
    with pytest.raises(end):
        await demo._run(Launch(options, RunLayout(Path("/r"), Path("/s"))), [])
    async with await AsyncBus.connect(redis_url, "demo-test", client_name="test") as bus:
        assert await delete_deployment(bus) == 0


async def test_a_redis_that_is_gone_does_not_hide_why_it_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ResolvedOptions("m", False, 1, redis_url="unix:///nowhere/redis.sock", deployment="demo-test")

    async def fails(*_: object) -> None:
        raise demo.DemoFailedError

    monkeypatch.setattr(demo, "_run_system", fails)
    with pytest.raises(demo.DemoFailedError):
        await demo._run(Launch(options, RunLayout(Path("/r"), Path("/s"))), [])
    assert "triptych:demo-test:*" in capsys.readouterr().err


def test_a_redis_that_answers_passes(redis_url: str) -> None:
    check_redis(redis_url, "default")
