"""`python -m triptych_gateway` as a process: starts, is healthy, drains, ends."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment, exit_code, process_of, until_status
from tests.support.gateway.samples import MODEL
from tests.support.otlp_receivers import RECEIVERS, all_spans
from tests.support.waiting import free_port, until
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry


async def test_life_of_the_process(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    env = environment(redis_url, tmp_path, port)
    assert await exit_code("healthcheck", env=env) == 2
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakePrefillDecode().running(bus) as prefill_decode,
        process_of(env) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http,
    ):
        await until_status(http, 200)
        assert await exit_code("healthcheck", env=env) == 0
        registered = {record.instance: record for record in await Registry(bus).list_instances()}
        assert registered["gateway-0"].url == f"http://127.0.0.1:{port}"

        prefill_decode.behaviour = "hang"
        async with asyncio.TaskGroup() as group:
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
            asked = group.create_task(http.post("/v1/chat/completions", json=body))
            await until(lambda: prefill_decode.bodies)
            process.send_signal(signal.SIGTERM)
            await until_status(http, 503)  # it drains
            prefill_decode.release.set()
        assert asked.result().status_code == 200  # what was running was finished
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        assert "gateway-0" not in {record.instance for record in await Registry(bus).list_instances()}
    assert list((tmp_path / "traces").glob("*.jsonl"))


@pytest.mark.parametrize("protocol", RECEIVERS)
async def test_its_spans_reach_a_collector(redis_url: str, tmp_path: Path, protocol: str) -> None:
    """Of traces that are not sampled, the failed one alone; with its callers' ids."""
    port = free_port()
    with RECEIVERS[protocol]() as (endpoint, received):
        env = environment(redis_url, tmp_path, port) | {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            "TRIPTYCH_TRUST_TRACEPARENT": "true",
        }
        async with (
            await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
            FakePrefillDecode().running(bus) as prefill_decode,
            process_of(env) as process,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as http,
        ):
            await until_status(http, 200)
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
            ids: list[str] = []
            for behaviour, flag in (("ok", "00"), ("ok", "01"), ("fail", "00")):
                prefill_decode.behaviour = behaviour
                theirs = f"00-{len(ids) + 1:032x}-{'2' * 16}-{flag}"
                answer = await http.post("/v1/chat/completions", json=body, headers={"traceparent": theirs})
                ids.append(answer.headers["x-request-id"])
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == 0
    roots = {
        next(each.value.string_value for each in span.attributes if each.key == "triptych.request_id"): span
        for span in all_spans(received)
        if span.name == f"chat {MODEL}"
    }
    assert list(roots) == ids[1:]
    assert [int.from_bytes(span.trace_id) for span in roots.values()] == [2, 3]
    assert {span.parent_span_id.hex() for span in roots.values()} == {"2" * 16}
    assert "traces" not in os.listdir(tmp_path), "no files beside a collector"


async def test_without_redis_it_ends_with_an_error(tmp_path: Path) -> None:
    env = environment(f"unix://{tmp_path}/nothing.sock", tmp_path, free_port())
    assert await exit_code(env=env) == 1
    assert await exit_code("--port", "nonsense", env=env) == 2
