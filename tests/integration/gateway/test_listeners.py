"""The gateway's ports and addresses: TLS, what the internal one serves, proxies in front, IPv4 and IPv6."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from pydantic import ValidationError
from starlette.responses import Response

from tests.support.gateway.certificates import Authority
from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import service_of
from tests.support.gateway.samples import MODEL, data_url, image_bytes, image_part
from tests.support.gateway.serving import served
from tests.support.gateway.spans import exported_spans
from tests.support.gateway.system import System
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_common.runtime import StopSignal
from triptych_common.runtime.healthcheck import HEALTHY, NO_ANSWER
from triptych_common.runtime.listening import ListenError
from triptych_gateway.service import TlsFilesError, health_code, run
from triptych_gateway.settings import GatewaySettings

IMAGE = image_part(5)
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    for name in ("localhost", "caller"):
        made.server_context(name)
    return made


@asynccontextmanager
async def running(redis_url: str, run_dir: Path, **changes: Any) -> AsyncIterator[GatewaySettings]:
    """The service itself, between stand-ins, until the block ends."""
    values: dict[str, Any] = {
        "redis_url": redis_url,
        "run_dir": run_dir,
        "host": "localhost",
        "port": free_port(),
        "registry_interval_s": 0.05,
        "drain_grace_s": 0.0,
        "inline_media_bytes": 0,  # encoders fetch them
    } | changes
    settings, stop = GatewaySettings(**values), StopSignal()
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        FakeEncoder(bus).running(),
        FakePrefillDecode().running(bus),
        asyncio.TaskGroup() as group,
    ):
        group.create_task(run(settings, stop))
        try:
            await until_async(lambda: asyncio.to_thread(lambda: health_code(settings) == HEALTHY))
            yield settings
        finally:
            stop.set("the test has ended")


def with_tls(authority: Authority) -> dict[str, Any]:
    return {"tls_cert_file": authority.folder / "localhost.pem", "internal_port": free_port()}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca_file))


async def get(url: str, verify: ssl.SSLContext | bool = True, **options: Any) -> httpx.Response:
    async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=10) as client:
        return await client.request(options.pop("method", "GET"), url, **options)


async def test_callers_are_served_by_https_and_encoders_without(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    async with running(redis_url, tmp_path, **with_tls(authority)) as settings:
        callers = f"https://localhost:{settings.port}"
        answer = await get(f"{callers}/v1/chat/completions", trusting(authority), method="POST", json=CHAT)
        assert answer.status_code == 200, "an encoder has fetched the image"
        with pytest.raises(httpx.ConnectError):
            await get(f"{callers}/health", True)  # an authority that nobody else knows
        with pytest.raises(httpx.HTTPError):
            await get(f"http://localhost:{settings.port}/health")
        for path in ("/metrics", "/internal/media/x"):
            answer = await get(callers + path, trusting(authority))
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
        assert (await get(f"{callers}/health", trusting(authority))).status_code == 200

        internal = settings.local_urls[0]
        assert internal == f"http://localhost:{settings.internal_port}"
        for path in ("/metrics", "/health", "/health/ready", "/version"):
            assert (await get(internal + path)).status_code == 200, path
        assert (await get(f"{internal}/internal/media/x")).json()["error"]["code"] == "media_gone"
        for path in ("/v1/models", "/v1/files", "/tokenize", "/v1/chat/completions"):
            answer = await get(internal + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path


async def test_a_handshake_that_does_not_end_is_closed_like_a_head_that_does_not(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    """Such connections are no idle ones yet, which are bounded in number."""
    async with running(redis_url, tmp_path, **with_tls(authority), header_timeout_s=0.3) as settings:
        reader, writer = await asyncio.open_connection("localhost", settings.port)
        async with asyncio.timeout(30):  # the server's own limit was 60 s
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()
        answer = await get(f"https://localhost:{settings.port}/health", trusting(authority))
        assert answer.status_code == 200


async def test_the_internal_port_may_have_an_address_of_its_own(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    """An image is fetched from there, and health is asked there."""
    options = with_tls(authority) | {"host": "127.0.0.1", "internal_host": "127.0.0.2"}
    async with running(redis_url, tmp_path, **options) as settings:
        callers = f"https://localhost:{settings.port}"
        answer = await get(f"{callers}/v1/chat/completions", trusting(authority), method="POST", json=CHAT)
        assert answer.status_code == 200
        internal = f"http://127.0.0.2:{settings.internal_port}"
        assert (settings.local_urls[0], settings.media_base_url) == (internal, internal)
        assert (await get(f"{internal}/metrics")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await get(f"http://127.0.0.1:{settings.internal_port}/metrics")


async def test_callers_may_have_to_show_a_certificate(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    options = with_tls(authority) | {"tls_client_ca_file": authority.ca_file}
    async with running(redis_url, tmp_path, **options) as settings:
        url, context = f"https://localhost:{settings.port}/v1/models", trusting(authority)
        with pytest.raises(httpx.HTTPError):
            await get(url, context)
        context.load_cert_chain(authority.folder / "caller.pem")
        assert (await get(url, context)).status_code == 200


async def test_files_that_cannot_be_used_end_the_service(
    redis_url: str, tmp_path: Path, authority: Authority
) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("no certificate")
    for changes in (
        {"tls_cert_file": tmp_path / "none.pem"},
        {"tls_cert_file": bad},
        {"tls_key_file": authority.folder / "caller.pem"},
        {"tls_client_ca_file": bad},
    ):
        options = with_tls(authority) | changes
        settings = GatewaySettings(redis_url=redis_url, run_dir=tmp_path, port=free_port(), **options)
        with pytest.raises(TlsFilesError, match="the TLS files cannot be used"):
            await run(settings, StopSignal())


@pytest.mark.parametrize(
    "values",
    [
        {"tls_key_file": "/x"},
        {"tls_client_ca_file": "/x", "internal_port": 8001},
        {"tls_cert_file": "/x"},
        {"internal_port": 8000},
        {"internal_host": "127.0.0.1"},
        {"forwarded_allow_ips": ["*"]},
    ],
)
def test_settings_that_do_not_fit(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(port=8000, **values)


@pytest.mark.parametrize(
    ("networks", "address", "scheme"),
    [
        ((), "127.0.0.1", "http"),
        (("127.0.0.0/8",), "203.0.113.9", "https"),
        (("10.0.0.0/8",), "127.0.0.1", "http"),
    ],
    ids=["nobody's", "the proxy's", "another's"],
)
async def test_a_proxys_word_counts_where_it_is_named(
    redis_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    networks: tuple[str, ...],
    address: str,
    scheme: str,
) -> None:
    """The last address that is no proxy's: what stands before it, anybody may have written."""
    with exported_spans(monkeypatch) as spans:
        async with running(redis_url, tmp_path, host="127.0.0.1", forwarded_allow_ips=networks) as settings:
            headers = {"X-Forwarded-For": "198.51.100.7, 203.0.113.9", "X-Forwarded-Proto": "https"}
            url = f"http://127.0.0.1:{settings.port}/v1/chat/completions"
            answer = await get(url, method="POST", json=CHAT, headers=headers)
            assert answer.status_code == 200
            root = f"chat {MODEL}"
            await until(lambda: root in {span.name for span in spans.get_finished_spans()})
        (span,) = [each for each in spans.get_finished_spans() if each.name == root]
        assert span.attributes is not None
        assert (span.attributes["client.address"], span.attributes["url.scheme"]) == (address, scheme)


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
    """Return a record as an older version would have written it."""
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
