"""Wrong password, none, a right that is missing: reported at once, with the setting, without the secret."""

import asyncio
import importlib.util
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import EmbeddedRedis
from tests.integration.common.samples import (
    STREAM,
    consuming_bus,
    ids,
    message,
    reading_bus,
    take,
    take_queued,
    until_lost,
)
from triptych_common.bus import AsyncBus, check_login
from triptych_common.domain.errors import BusRefusedError
from triptych_common.redis_client.rights import rules

PASSWORD = "open-sesame"
MODEL = Path(__file__).resolve().parents[4] / "models" / "digits-vl"
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
RIGHTS = rules("test")


@pytest.fixture
def raw(own_redis: EmbeddedRedis) -> Iterator[Any]:
    with closing(redis.Redis.from_url(own_redis.url)) as client:
        yield client


def as_user(server: EmbeddedRedis, user: str, password: str) -> str:
    return server.url.replace("unix://", f"unix://{user}:{password}@")


def add_user(raw: Any, name: str, *rules: str) -> None:
    raw.execute_command("ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}", *rules)


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("triptych", "wrong-secret", "refused the user name or password in TRIPTYCH_REDIS_URL"),
        ("nobody", "wrong-secret", "refused the user name or password in TRIPTYCH_REDIS_URL"),
        ("reader", PASSWORD, "the user of TRIPTYCH_REDIS_URL lacks a right"),
        ("elsewhere", PASSWORD, "the user of TRIPTYCH_REDIS_URL lacks a right"),
    ],
)
async def test_a_start_reports_what_is_wrong(
    own_redis: EmbeddedRedis, raw: Any, user: str, password: str, words: str
) -> None:
    add_user(raw, "triptych", *RIGHTS)
    add_user(raw, "reader", "~triptych:test:*", "+@read", "+@connection", "+info")
    add_user(raw, "elsewhere", *RIGHTS, "resetkeys", "~other:*")
    with pytest.raises(BusRefusedError, match=words) as caught:
        await AsyncBus.connect(as_user(own_redis, user, password), "test", client_name="tests")
    assert password not in str(caught.value)


async def test_no_password_where_one_is_needed(own_redis: EmbeddedRedis, raw: Any) -> None:
    raw.config_set("requirepass", PASSWORD)
    with pytest.raises(BusRefusedError, match="asks for a password, and TRIPTYCH_REDIS_URL has none"):
        await AsyncBus.connect(own_redis.url, "test", client_name="tests")


@pytest.mark.parametrize(
    ("changes", "is_cut_off", "why"),
    [
        (("resetpass", ">another"), True, None),
        (("-xadd", "-xreadgroup"), False, "lacks a right"),
    ],
    ids=["another password", "a right that is taken away"],
)
async def test_a_running_service_goes_on_once_it_is_let_in_again(
    own_redis: EmbeddedRedis, raw: Any, changes: tuple[str, ...], is_cut_off: bool, why: str | None
) -> None:
    add_user(raw, "triptych", *RIGHTS)
    async with consuming_bus(as_user(own_redis, "triptych", PASSWORD)) as (bus, consumer):
        await bus.publish(STREAM, message(1))
        assert await take(consumer, 1) == ids(1)
        raw.execute_command("ACL", "SETUSER", "triptych", *changes)
        if is_cut_off:
            raw.client_kill_filter(_type="normal", skipme=True)
        taking = asyncio.ensure_future(take(consumer, 1))
        await until_lost(consumer)
        with pytest.raises(BusRefusedError, match=why):
            await bus.publish(STREAM, message(2))
        add_user(raw, "triptych", *RIGHTS)
        await bus.publish(STREAM, message(3))
        assert await taking == ids(3)


def test_threaded_bus_goes_on_once_it_is_let_in_again(own_redis: EmbeddedRedis, raw: Any) -> None:
    add_user(raw, "triptych", *RIGHTS)
    with reading_bus(as_user(own_redis, "triptych", PASSWORD)) as (bus, received):
        bus.publish(STREAM, message(1))
        assert take_queued(received, 1) == ids(1)
        raw.execute_command("ACL", "SETUSER", "triptych", "off")
        raw.client_kill_filter(_type="normal", skipme=True)
        bus.publish(STREAM, message(2))
        with pytest.raises(queue.Empty):
            received.get(timeout=0.3)
        add_user(raw, "triptych", *RIGHTS)
        assert take_queued(received, 1) == ids(2)


@pytest.mark.parametrize(
    ("service", "options"),
    [
        ("gateway", ["--port=0"]),
        pytest.param("encoder", [f"--model={MODEL}"], marks=[NEEDS_VLLM, pytest.mark.slow]),
        pytest.param(
            "prefill_decode", [f"--model={MODEL}", "--port=0"], marks=[NEEDS_VLLM, pytest.mark.slow]
        ),
    ],
)
def test_a_service_ends_at_its_start(
    own_redis: EmbeddedRedis, raw: Any, tmp_path: Path, service: str, options: list[str]
) -> None:
    """Engines are not even loaded."""
    add_user(raw, "triptych", *RIGHTS)
    url = as_user(own_redis, "triptych", "wrong-secret")
    tmp_path.chmod(0o700)
    ended = subprocess.run(
        [
            sys.executable, "-m", f"triptych_{service}", "--deployment=test", f"--run-dir={tmp_path}",
            *options,
        ],
        env={**os.environ, "TRIPTYCH_REDIS_URL": url},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 1, ended.stderr
    assert "refused the user name or password in TRIPTYCH_REDIS_URL" in ended.stderr
    assert "wrong-secret" not in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr
    assert "EngineCore" not in ended.stderr + ended.stdout


async def test_an_expensive_start_checks_its_login_first(own_redis: EmbeddedRedis, raw: Any) -> None:
    add_user(raw, "triptych", *RIGHTS)
    await check_login(as_user(own_redis, "triptych", PASSWORD), "test", client_name="tests")
    with pytest.raises(BusRefusedError):
        await check_login(as_user(own_redis, "triptych", "wrong-secret"), "test", client_name="tests")
    own_redis.stop()
    await check_login(as_user(own_redis, "triptych", PASSWORD), "test", client_name="tests")  # it may come
