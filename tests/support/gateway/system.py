"""A real gateway on a real Redis, between a fake encoder and a fake prefill_decode."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import DIGEST, MODEL
from tests.support.gateway.serving import QuietServer, served
from tests.support.item_records import IMAGE_LIMITS
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus
from triptych_common.protocol.messages import Modality
from triptych_gateway.app import create_app
from triptych_gateway.encode.encode_backlog import MIN_KNOWN, EncodeWork
from triptych_gateway.gateway import Gateway, run_gateway
from triptych_gateway.http_protocol import bounded_protocol
from triptych_gateway.settings import GatewaySettings

_TLS = ssl.create_default_context()  # one for all clients: reading its certificates takes 30 ms


@dataclass
class System:
    """What a test calls."""

    gateway: Gateway
    bus: AsyncBus
    encoder: FakeEncoder
    prefill_decode: FakePrefillDecode
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient
    server: QuietServer
    stack: AsyncExitStack = field(repr=False)

    async def ask(self, content: Any, **options: Any) -> Any:
        """One chat completion by the openai client."""
        return await self.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], **options
        )

    async def post(self, body: Any, **options: Any) -> httpx.Response:
        """One raw request."""
        if isinstance(body, bytes):
            return await self.http.post("/v1/chat/completions", content=body, **options)
        return await self.http.post("/v1/chat/completions", json=body, **options)

    async def post_raw(self, content: Any) -> httpx.Response:
        """One request whose body is sent as it is, or in pieces, with no length announced."""
        return await self.http.post("/v1/chat/completions", content=content)

    async def refresh(self) -> None:
        """The gateway reads the registry now."""
        await until_async(self.gateway.view.refresh)  # one read may take too long on a busy machine

    async def wait_flights_ended(self) -> None:
        """Wait until no encoder works on a job any more: who needs an item meanwhile would join it."""
        client: Any = self.bus.client

        async def have_ended() -> bool:
            keys = [self.bus.names.inflight(DIGEST, each.mm_hash) for each in self.encoder.jobs]
            return not {b"claimed", b"queued", b"running"}.intersection(
                [await client.hget(key, "state") for key in keys]
            )

        await until_async(have_ended)

    async def assert_idle(self) -> None:
        """Nothing of any request is left, at the latest a moment after its answer."""
        limiter, router = self.gateway.services.access.limiter, self.gateway.router
        await until(lambda: not limiter.num_requests)
        assert limiter.media_bytes == 0
        await until(lambda: not len(self.gateway.media_cache))  # a file that was uploaded is encoded ahead
        await until(lambda: not any(map(router.num_in_flight, ("pd-0", "p-0", "p-1", "d-0", "d-1"))))
        assert not [item for item in self.gateway.orders.table if item.request_ids]
        assert len(self.gateway.transfers.table) == 0


@asynccontextmanager
async def opened_system(
    redis_url: str,
    run_dir: Path,
    fake: FakePrefillDecode | None = None,
    /,
    encoder_store: str = "store-0",
    encoder_limits: Mapping[Modality, int] = IMAGE_LIMITS,
    *,
    has_encoder: bool = True,
    **changes: Any,
) -> AsyncIterator[System]:
    """Everything started and known to each other; `has_encoder` False leaves the encoder to be started.

    `redis_url` among `changes` is the gateway's alone.
    """
    values: dict[str, Any] = {
        "redis_url": redis_url,
        "run_dir": run_dir,
        "port": free_port(),
        "registry_interval_s": 0.05,
        "first_token_timeout_s": 10.0,
        "encoder_grace_s": 1.0,
        "connect_timeout_s": 5.0,
        "suspect_s": 0.2,
        "limits_timeout_s": 15.0,  # a busy machine is no Redis that is away
    } | changes
    settings = GatewaySettings(**values)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(
            await AsyncBus.connect(redis_url, settings.deployment, client_name="test")
        )
        encoder = FakeEncoder(bus, store=encoder_store, item_limits=encoder_limits)
        if has_encoder:
            await stack.enter_async_context(encoder.running())
        prefill_decode = await stack.enter_async_context((fake or FakePrefillDecode()).running(bus))
        gateway, server, client, http = await stack.enter_async_context(_served_gateway(settings))
        system = System(gateway, bus, encoder, prefill_decode, client, http, server, stack)
        await system.refresh()  # the gateway registers itself after its first read
        yield system
        await system.assert_idle()


@asynccontextmanager
async def another_gateway(system: System, instance: str, **changes: Any) -> AsyncIterator[System]:
    """`system` by one more gateway, until the block ends; once more under the same name: a restart."""
    settings = system.gateway.settings.model_copy(
        update={"instance": instance, "port": free_port()} | changes
    )
    async with _served_gateway(settings) as (gateway, server, client, http):
        other = replace(system, gateway=gateway, openai=client, http=http, server=server)
        yield other
        await other.assert_idle()


@asynccontextmanager
async def _served_gateway(
    settings: GatewaySettings,
) -> AsyncIterator[tuple[Gateway, QuietServer, openai.AsyncOpenAI, httpx.AsyncClient]]:
    """A gateway behind its port, and two clients of it."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(run_gateway(settings))
        _know_encode_speed(gateway)
        _read_registry_in_turns(gateway)
        protocol = bounded_protocol(settings, settings.max_idle_connections)
        server = await stack.enter_async_context(served(create_app(gateway), settings.port, http=protocol))
        client = await stack.enter_async_context(
            openai.AsyncOpenAI(
                base_url=f"{settings.local_urls[0]}/v1",
                api_key="none",
                max_retries=0,
                timeout=20,
                http_client=openai.DefaultAsyncHttpxClient(verify=_TLS),
            )
        )
        http = await stack.enter_async_context(
            httpx.AsyncClient(base_url=settings.local_urls[0], trust_env=False, timeout=20, verify=_TLS)
        )
        yield gateway, server, client, http


def _read_registry_in_turns(gateway: Gateway) -> None:
    """No read that began before `System.refresh` brings back what was there before it."""
    read, turn = gateway.view.refresh, asyncio.Lock()

    async def refresh() -> bool:
        async with turn:
            return await read()

    gateway.view.refresh = refresh  # type: ignore[method-assign]


def _know_encode_speed(gateway: Gateway) -> None:
    """As if it had seen encodes: no request waits for the first ones."""
    for modality in Modality:
        for _ in range(MIN_KNOWN):
            gateway.orders.admission.backlog.observe(DIGEST, EncodeWork(modality, 0), 1e-6)
