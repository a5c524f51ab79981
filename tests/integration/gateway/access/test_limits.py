"""Limits of API keys over real gateways and one Redis, as OpenAI's client meets them."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.conftest import EmbeddedRedis
from tests.support.gateway.fake_prefill_decode import USAGE
from tests.support.gateway.file_samples import file_part, upload
from tests.support.gateway.samples import MODEL, data_url, entry, image_bytes, write_keys
from tests.support.gateway.system import System, another_gateway, opened_system
from tests.support.waiting import until, until_async
from triptych_common.coordination import RequestCounts
from triptych_common.redis_client import commands
from triptych_gateway.access import key_limiter

MEDIA = image_bytes(7)
IMAGE = {"type": "image_url", "image_url": {"url": data_url(MEDIA)}}
RATE_HEADERS = {f"x-ratelimit-{part}-requests" for part in ("limit", "remaining", "reset")}


@asynccontextmanager
async def limited(redis_url: str, path: Path, *entries: str, **changes: Any) -> AsyncIterator[System]:
    keys = write_keys(path / "keys.toml", *entries)
    async with opened_system(redis_url, path, api_keys_file=keys, api_keys_check_s=0.02, **changes) as system:
        yield system


async def ask(system: System, key: str, content: Any = "hello", **options: Any) -> Any:
    """The answer with its headers; or OpenAI's error."""
    client = system.openai.with_options(api_key=key)
    messages: Any = [{"role": "user", "content": content}]
    return await client.chat.completions.with_raw_response.create(model=MODEL, messages=messages, **options)


async def refused(system: System, key: str, content: Any = "hello", **options: Any) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(system, key, content, **options)
    assert caught.value.code == "rate_limit_exceeded"
    return caught.value


async def test_two_gateways_let_exactly_ten_of_forty_pass(redis_url: str, tmp_path: Path) -> None:
    keys = entry("alice", "one", requests_per_minute=10)
    async with limited(redis_url, tmp_path, keys) as first, another_gateway(first, "gateway-1") as second:
        gateways = [first, second]
        answers = await asyncio.gather(
            *(ask(gateways[number % 2], "one") for number in range(40)), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        assert len(errors) == 30, answers
        assert len(first.prefill_decode.bodies) == 10
        for error in errors:
            assert isinstance(error, openai.RateLimitError)
            assert error.code == "rate_limit_exceeded"
            assert error.response.headers.keys() >= RATE_HEADERS
            assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
            assert 1 <= int(error.response.headers["retry-after"]) <= 6
        served: list[Any] = [answer for answer in answers if not isinstance(answer, BaseException)]
        remaining = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in served)
        assert remaining == list(range(10))
        assert {answer.headers["x-ratelimit-limit-requests"] for answer in served} == {"10"}
        registries = [each.gateway.services.metrics.metrics.registry for each in gateways]
        name = "triptych_gateway_limited_requests_total"
        assert sum(each.get_sample_value(name, {"limit": "requests"}) or 0 for each in registries) == 30


async def test_keys_without_limits_are_not_counted(redis_url: str, tmp_path: Path) -> None:
    keys = (entry("alice", "one", requests_per_minute=1), entry("bob", "two"))
    async with limited(redis_url, tmp_path, *keys) as system:
        await ask(system, "one")
        for _ in range(3):
            answer = await ask(system, "two")
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert [key async for key in system.bus.client.scan_iter("*limit-*")] == [
            b"triptych:default:limit-levels:{alice}"
        ]


async def test_a_stream_is_counted_and_looks_as_it_was_asked_for(redis_url: str, tmp_path: Path) -> None:
    keys = (entry("alice", "one", tokens_per_minute=60), entry("bob", "two"))
    async with limited(redis_url, tmp_path, *keys) as system:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        streams = []
        for key in ("one", "two"):
            answer = await system.post(body, headers={"Authorization": f"Bearer {key}"})
            *events, done = answer.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            streams.append([json.loads(event.removeprefix("data: ")) for event in events])
        assert streams[0] == streams[1]
        assert "system_fingerprint" in streams[0][-1]
        assert not [each for each in streams[0] if "usage" in each]
        assert [each.get("stream_options") for each in system.prefill_decode.bodies] == [
            {"include_usage": True},
            None,
        ]
        names = system.bus.names

        async def is_settled() -> bool:
            kept = await system.bus.client.hgetall(names.limit_levels("alice"))
            return (
                float(kept[b"tokens"].split()[0]) <= USAGE["total_tokens"]
            )  # the answer's; its prompt was charged with more

        await until_async(is_settled)
        with_usage = await system.post(
            body | {"stream_options": {"include_usage": True}}, headers={"Authorization": "Bearer one"}
        )
        assert with_usage.text.count('"usage"') == 1


async def test_requests_in_flight_are_bounded_over_gateways(redis_url: str, tmp_path: Path) -> None:
    keys = entry("alice", "one", max_concurrent_requests=2)
    async with limited(redis_url, tmp_path, keys) as first, another_gateway(first, "gateway-1") as second:
        first.prefill_decode.behaviour = "hang"
        async with asyncio.TaskGroup() as group:
            for system in (first, second):
                group.create_task(ask(system, "one"))
            await until(lambda: len(first.prefill_decode.bodies) == 2)
            for system in (first, second):
                error = await refused(system, "one")
                assert "2 requests in flight" in str(error)
            first.prefill_decode.release.set()

        async def is_free() -> bool:
            return not await first.bus.client.exists(first.bus.names.limit_places("alice"))

        await until_async(is_free)
        await ask(first, "one")


async def test_a_long_request_keeps_its_place_and_a_dead_gateways_is_given_back(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limiter, "RENEW_S", 0.02)
    keys = entry("alice", "one", max_concurrent_requests=1)
    async with limited(redis_url, tmp_path, keys) as system:
        places = system.bus.names.limit_places("alice")

        async def lease_ends() -> list[Any]:
            return list(await system.bus.client.hvals(places))

        system.prefill_decode.behaviour = "hang"
        async with asyncio.TaskGroup() as group:
            group.create_task(ask(system, "one"))
            await until(lambda: system.prefill_decode.bodies)
            (first_end,) = await lease_ends()

            async def is_renewed() -> bool:
                return await lease_ends() > [first_end]

            await until_async(is_renewed)
            await refused(system, "one")
            system.prefill_decode.release.set()

        async def is_free() -> bool:
            return not await lease_ends()

        await until_async(is_free)
        counts = RequestCounts(system.bus)  # as a gateway that ends before it settles
        dead = await counts.count_request("alice", [], place="dead", max_places=1, lease_s=0.5)
        assert dead.reached is None
        await refused(system, "one")
        await until_async(served(system))


async def test_a_client_that_goes_away_gives_its_place_back(redis_url: str, tmp_path: Path) -> None:
    keys = entry("alice", "one", max_concurrent_requests=1)
    async with limited(redis_url, tmp_path, keys) as system:
        system.prefill_decode.behaviour = "hang"
        task = asyncio.get_running_loop().create_task(ask(system, "one"))
        await until(lambda: system.prefill_decode.bodies)
        await refused(system, "one")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        system.prefill_decode.behaviour = "ok"
        await until_async(served(system))


def served(system: System) -> Any:
    async def is_served() -> bool:
        try:
            await ask(system, "one")
        except openai.RateLimitError:
            return False
        return True

    return is_served


async def test_media_bytes_are_bounded(redis_url: str, tmp_path: Path) -> None:
    keys = entry("alice", "one", media_bytes_per_minute=len(MEDIA) * 3 // 2)
    async with limited(redis_url, tmp_path, keys) as system:
        await ask(system, "one", [IMAGE])
        error = await refused(system, "one", [IMAGE])
        assert "media bytes per minute" in str(error)
        await ask(system, "one")  # text


async def test_media_that_are_named_are_charged_afterwards(redis_url: str, tmp_path: Path) -> None:
    keys = entry("alice", "one", media_bytes_per_minute=len(MEDIA) // 2)
    options: dict[str, Any] = {"files_dir": tmp_path / "files", "files_encode_ahead": False}
    async with limited(redis_url, tmp_path, keys, **options) as system:
        file = await upload(system, MEDIA, key="one")
        await ask(system, "one", [file_part(file.id)])

        async def is_refused() -> bool:
            try:
                await ask(system, "one", [IMAGE])
            except openai.RateLimitError:
                return True
            return False

        await until_async(is_refused)
        error = await refused(system, "one", [IMAGE])
        assert int(error.response.headers["retry-after"]) > 60  # twice a minute's worth is used


async def status(system: System, key: str) -> int:
    answer = await system.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
    return answer.status_code


def answers(system: System, key: str, code: int) -> Any:
    async def is_so() -> bool:
        return await status(system, key) == code

    return is_so


async def test_a_changed_file_counts_without_a_restart(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = tmp_path / "keys.toml"
    async with limited(redis_url, tmp_path, entry("alice", "one")) as system:
        write_keys(path, entry("bob", "two", requests_per_minute=1))
        await until_async(answers(system, "one", 401))
        assert await status(system, "two") == 200
        await ask(system, "two")
        await refused(system, "two")
        for broken in ("keys = [", entry("carol", "three") + "oops = 1\n"):
            num_warnings = messages(caplog).count(NOT_USABLE)
            write_keys(path, broken)
            await until(lambda before=num_warnings: messages(caplog).count(NOT_USABLE) > before)
            assert await status(system, "two") == 200
            assert await status(system, "three") == 401
        num_warnings = messages(caplog).count(NOT_USABLE)
        path.unlink()
        await until(lambda: messages(caplog).count(NOT_USABLE) > num_warnings)
        assert await status(system, "two") == 200
        write_keys(path, entry("carol", "three"))
        await until_async(answers(system, "two", 401))
        assert await status(system, "three") == 200
        assert "key-" not in caplog.text


NOT_USABLE = "file of API keys not usable, the former keys stay in force"


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records]


async def test_a_secret_that_is_exchanged_by_its_link(redis_url: str, tmp_path: Path) -> None:
    """As Kubernetes does: the file is a link by way of a folder that is a link to the present version."""
    for version, key in (("v1", "one"), ("v2", "two")):
        (tmp_path / version).mkdir()
        write_keys(tmp_path / version / "keys.toml", entry("alice", key))
    data = tmp_path / "..data"
    data.symlink_to("v1")
    path = tmp_path / "secret.toml"
    path.symlink_to("..data/keys.toml")
    async with opened_system(redis_url, tmp_path, api_keys_file=path, api_keys_check_s=0.02) as system:
        assert (await status(system, "one"), await status(system, "two")) == (200, 401)
        new = tmp_path / "..new"
        new.symlink_to("v2")
        new.rename(data)
        await until_async(answers(system, "two", 200))
        assert await status(system, "one") == 401


@pytest.mark.parametrize("way", ["open", "closed"])
async def test_while_redis_is_away(own_redis: EmbeddedRedis, tmp_path: Path, way: str) -> None:
    keys = (entry("alice", "one", requests_per_minute=1), entry("bob", "two"))
    changes = {"limits_without_redis": way, "limits_timeout_s": 0.2}
    async with limited(own_redis.url, tmp_path, *keys, **changes) as system:
        await ask(system, "one")
        await refused(system, "one")
        own_redis.stop()
        for _ in range(3):
            if way == "open":
                answer = await ask(system, "one")
                assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
            else:
                with pytest.raises(openai.InternalServerError) as caught:
                    await ask(system, "one")
                assert (caught.value.status_code, caught.value.code) == (503, "limits_unavailable")
                assert caught.value.response.headers["retry-after"] == "1"
            await ask(system, "two")
        own_redis.start()

        async def is_counted() -> bool:
            try:
                answer = await ask(system, "one")
            except (openai.RateLimitError, openai.InternalServerError) as error:
                return isinstance(error, openai.RateLimitError)
            return "x-ratelimit-limit-requests" in answer.headers

        await until_async(is_counted, limit_s=60.0)


async def test_a_redis_that_hangs_is_waited_for_within_a_bound(
    own_redis: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "COMMAND_LIMIT_S", 600.0)
    keys = entry("alice", "one", requests_per_minute=100)
    async with limited(own_redis.url, tmp_path, keys, limits_timeout_s=0.2) as system:
        await ask(system, "one")
        own_redis.freeze()
        try:
            async with asyncio.timeout(60):  # before a command's own limit
                answers = await asyncio.gather(*(ask(system, "one") for _ in range(10)))
        finally:
            own_redis.thaw()
        assert {answer.status_code for answer in answers} == {200}
