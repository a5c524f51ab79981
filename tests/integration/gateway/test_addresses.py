"""The gateway on IPv4 and IPv6: listens, is healthy, is reached by encoders, reaches prefill_decodes."""

import asyncio
import socket
from pathlib import Path

import httpx
import orjson
import pytest
from pydantic import ValidationError
from starlette.responses import Response

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.media_samples import data_url, image_bytes
from tests.support.gateway.process import service_of
from tests.support.gateway.serving import MODEL, served
from tests.support.gateway.system import System
from tests.support.waiting import free_port
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.runtime import StopSignal
from triptych_common.runtime.healthcheck import HEALTHY, NO_ANSWER
from triptych_common.runtime.listening import ListenError
from triptych_gateway.service import health_code, run
from triptych_gateway.settings import GatewaySettings

has_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")
HOSTS = ["0.0.0.0", *(pytest.param(host, marks=has_ipv6) for host in ("::1", "::"))]


@pytest.mark.parametrize("host", HOSTS)
async def test_an_image_goes_through_a_gateway_on_any_address(
    host: str, redis_url: str, tmp_path: Path
) -> None:
    """The encoder fetches the image from the gateway's advertised address, over a real socket."""
    port = free_port()
    # Bound to all addresses, it would be called by the name of this machine, which may have no address.
    is_any = host in ("0.0.0.0", "::")
    changes = {
        "host": host, "port": port, "inline_media_bytes": 0,
        "advertise_url": f"http://localhost:{port}" if is_any else None,
    }  # fmt: skip
    settings = GatewaySettings(run_dir=tmp_path, **changes)
    url = settings.local_urls[-1]
    assert await asyncio.to_thread(health_code, settings) == NO_ANSWER
    pd_host = "127.0.0.1" if "." in host else "::1"
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakeEncoder(bus).running() as encoder,
        FakePrefillDecode(host=pd_host).running(bus) as prefill_decode,
        service_of(redis_url, tmp_path, **changes),
    ):
        assert await asyncio.to_thread(health_code, settings) == HEALTHY
        parts = [{"type": "image_url", "image_url": {"url": data_url(image_bytes(size=(5, 4)))}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}]}
        async with httpx.AsyncClient(trust_env=False, timeout=20) as http:
            answer = await http.post(f"{url}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert encoder.jobs[0].media_url is not None
        assert len(prefill_decode.bodies) == 1


@has_ipv6
@pytest.mark.parametrize("listens", ["127.0.0.1", "::1"])
async def test_the_health_check_takes_whichever_loopback_answers(listens: str, tmp_path: Path) -> None:
    """`::` is IPv6 alone on some machines; IPv4 is switched off on others."""
    port = free_port()
    settings = GatewaySettings(host="::", port=port, run_dir=tmp_path)
    assert await asyncio.to_thread(health_code, settings) == NO_ANSWER
    async with served(Response("ready"), port, listens):
        assert await asyncio.to_thread(health_code, settings) == HEALTHY


async def test_a_port_that_is_taken_ends_the_start(redis_url: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = GatewaySettings(redis_url=redis_url, run_dir=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ListenError):
            await run(settings, StopSignal())


@pytest.mark.parametrize("advertise_url", ["::1", "http://::1:80", "gateway:8000", "http://h:1/?q"])
def test_an_address_that_cannot_be_called_is_refused(advertise_url: str) -> None:
    with pytest.raises(ValidationError, match="advertise_url"):
        GatewaySettings(advertise_url=advertise_url)


def record_with_url(url: str) -> bytes:
    """As an older version would have written it."""
    record = InstanceRecord(instance="pd-bad", boot_id="b", role=Role.PREFILL_DECODE, model=MODEL)
    fields = {**record.model_dump(mode="json"), "url": url, "namespace_digest": FakePrefillDecode.digest}
    return orjson.dumps({"v": 1, "record": fields})


async def test_a_record_with_an_invalid_url_costs_no_answer(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that the registry leaves out, nor one that got into the view all the same."""
    names = system.bus.names
    await system.bus.client.set(names.instance("pd-bad"), record_with_url("http://::1:8100"), ex=60)
    await system.bus.client.zadd(names.instances, {"pd-bad": 1})
    await system.refresh()
    assert "pd-bad" not in {record.instance for record in system.gateway.view.records}
    for _ in range(4):
        assert (await system.ask("hello")).choices[0].message.content

    registered = Registry.list_instances
    bad = InstanceRecord(instance="pd-bad", boot_id="b", role=Role.PREFILL_DECODE, model=MODEL)
    bad = bad.model_copy(update={"url": "http://::1:8100", "namespace_digest": FakePrefillDecode.digest})

    async def with_bad(registry: Registry) -> list[InstanceRecord]:
        return [bad, *await registered(registry)]

    monkeypatch.setattr(Registry, "list_instances", with_bad)
    await system.refresh()
    assert "pd-bad" in {record.instance for record in system.gateway.view.records}
    for _ in range(4):
        assert (await system.ask("hello")).choices[0].message.content
