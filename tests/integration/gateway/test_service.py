"""`python -m triptych_gateway` as a process: it starts, is healthy, ends; it drains, and an instance may."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment, exit_code, process_of, service_of, until_status
from tests.support.gateway.samples import MODEL, data_url, image_bytes
from tests.support.gateway.serving import served
from tests.support.gateway.system import System
from tests.support.otlp_receivers import RECEIVERS, all_spans
from tests.support.waiting import free_port, until
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.runtime import DrainGate
from triptych_gateway.routing.registry_view import RegistryView


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


OTHER_MODEL = "other-vl"
TEXT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
IMAGE = {"type": "image_url", "image_url": {"url": data_url(image_bytes(size=(5, 4)))}}


# ---- a prefill_decode drains ----------------------------------------------------------------------
@dataclass
class DrainingPrefillDecode(FakePrefillDecode):
    """A fake engine behind the real gate; of a model of its own, so that these are alone."""

    async def drain(self, *, announce: bool) -> None:
        if announce:
            await self.registration.announce_draining()
        self.gate.refuse()

    def record(self) -> InstanceRecord:
        return super().record().model_copy(update={"model": OTHER_MODEL})

    @asynccontextmanager
    async def running(self, bus: AsyncBus) -> AsyncIterator["DrainingPrefillDecode"]:
        self.gate = DrainGate(self.app(), lambda path: True)
        async with (
            served(self.gate, self.port),
            Registry(bus).keep_registered(self.record()) as self.registration,
        ):
            yield self


def names(view: RegistryView) -> set[str]:
    """Return the instances that serve the other model."""
    return {record.instance for record in view.serving if record.model == OTHER_MODEL}


async def test_a_refused_request_goes_elsewhere(system: System) -> None:
    """The gateway does not know yet: it chooses the one that drains, and the caller never notices."""
    draining, other = DrainingPrefillDecode(name="pd-a"), DrainingPrefillDecode(name="pd-b")
    async with draining.running(system.bus), other.running(system.bus):
        await until(lambda: names(system.gateway.view) == {"pd-a", "pd-b"})
        await draining.drain(announce=False)
        for _ in range(4):
            assert (await system.post(TEXT | {"model": OTHER_MODEL})).status_code == 200
    assert (len(draining.bodies), len(other.bodies)) == (0, 4)


@pytest.mark.parametrize("system", [{"registry_interval_s": 0.5}], indirect=True)
async def test_a_new_instance_is_found_by_another_read(system: System) -> None:
    """All instances in the gateway's view refuse; the new one is not in it yet."""
    first, second = DrainingPrefillDecode(name="pd-a"), DrainingPrefillDecode(name="pd-b")
    async with first.running(system.bus):
        await until(lambda: names(system.gateway.view) == {"pd-a"})
        async with second.running(system.bus):
            await first.drain(announce=True)
            assert (await system.post(TEXT | {"model": OTHER_MODEL})).status_code == 200
    assert (len(first.bodies), len(second.bodies)) == (0, 1)


async def test_the_first_choice_is_left_when_it_drains_meanwhile(system: System) -> None:
    """The image's sizes are awaited; by then the chosen instance is leaving."""
    system.encoder.before_metadata.clear()
    instances = {name: DrainingPrefillDecode(name=name) for name in ("pd-a", "pd-b")}
    async with instances["pd-a"].running(system.bus), instances["pd-b"].running(system.bus):
        await until(lambda: names(system.gateway.view) == {"pd-a", "pd-b"})
        async with asyncio.TaskGroup() as group:
            body = {"model": OTHER_MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}
            asked = group.create_task(system.post(body))
            await until(lambda: system.encoder.jobs)
            chosen = system.encoder.jobs[0].requesters[0].prefill_decode
            await instances[chosen].registration.announce_draining()
            await until(lambda: names(system.gateway.view) == {"pd-a", "pd-b"} - {chosen})
            system.encoder.before_metadata.set()
        assert asked.result().status_code == 200
    assert {name: len(each.bodies) for name, each in instances.items()} == {
        name: int(name != chosen) for name in instances
    }


# ---- the gateway drains ---------------------------------------------------------------------------
async def test_in_the_grace_late_requests_are_served(redis_url: str, tmp_path: Path) -> None:
    port = free_port()
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakePrefillDecode().running(bus),
        process_of(environment(redis_url, tmp_path, port) | {"TRIPTYCH_DRAIN_GRACE_S": "60"}) as process,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        await until_status(http, 200)
        process.send_signal(signal.SIGTERM)
        await until_status(http, 503)
        late = await http.post("/v1/chat/completions", json=TEXT)
        assert (late.status_code, late.headers["connection"]) == (200, "close")
        async with asyncio.timeout(60):
            while True:  # announced: no encoder asks for its media any more
                records = {each.instance: each for each in await Registry(bus).list_instances()}
                if records["gateway-0"].draining:
                    break


async def test_media_are_served_until_the_last_request_has_ended(redis_url: str, tmp_path: Path) -> None:
    """Behind the drain an encoder still comes for the media of a running request, by a new connection."""
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakeEncoder(bus).running() as encoder,
        FakePrefillDecode().running(bus),
        service_of(redis_url, tmp_path, inline_media_bytes=0) as service,
    ):
        encoder.before_metadata.clear()
        async with asyncio.TaskGroup() as group:
            body = {"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}
            asked = group.create_task(service.http.post("/v1/chat/completions", json=body))
            await until(lambda: encoder.jobs)
            service.stop.set("SIGTERM")
            await until_status(service.http, 503)
            while (refused := await service.http.post("/v1/chat/completions", json=TEXT)).is_success:
                pass  # it is still leaving: late requests are served
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert refused.headers["retry-after"] == "1"
            encoder.before_metadata.set()
        assert asked.result().status_code == 200
        await service.wait_ended()
        assert await bus.client.exists(bus.names.encode_results("gateway-0")) == 0
        assert "gateway-0" not in {each.instance for each in await Registry(bus).list_instances()}


@pytest.mark.parametrize("stream", [True, False])
async def test_what_is_not_finished_in_time_ends_with_an_error(
    redis_url: str, tmp_path: Path, stream: bool
) -> None:
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakePrefillDecode(behaviour="stall" if stream else "hang").running(bus) as prefill_decode,
        service_of(redis_url, tmp_path, drain_timeout_s=0.3) as service,
    ):
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(
                service.http.post("/v1/chat/completions", json=TEXT | {"stream": stream})
            )
            await until(lambda: prefill_decode.bodies)
            service.stop.set("SIGTERM")
        answer = asked.result()
        if stream:
            assert (answer.status_code, answer.text.count("[DONE]")) == (200, 0)
            assert '"code":"draining"' in answer.text.splitlines()[-2]
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await service.wait_ended()
