"""Fault points: the steps of the protocol, noticed inside the processes of a test.

A point is a step and a moment of it: `sending` (about to be sent), `sent`, `received` (not handled yet) and
`handled` (not acked yet). A test arms a point by a file of that name; the first process that reaches it
takes the file, notifies the test over a socket, and stops until the test has injected its fault.
Nothing of this is in the product: `install` puts itself around the bus, the store's sessions and HTTP.
"""

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import httpx
import orjson

from tests.support.protocol_steps import STEPS, Channel, Party, Step
from triptych_common.bus import async_bus as asyncbus
from triptych_common.bus import stream_consumer as consumer
from triptych_common.coordination import JobOffer, SingleFlight
from triptych_common.protocol.messages import Message
from triptych_common.protocol.store import EntrySealed, Hello, StoreCommand, WriterLost
from triptych_common.store_session import AsyncStoreSession, StoreSession

SENDING, SENT, RECEIVED, HANDLED = "sending", "sent", "received", "handled"
CONTROL_SOCKET = "control.sock"
CONTROL_LIMIT_S = 60.0
SEEN = "seen"  # folder with a file for every point that was ever reached

_MEDIA_PATH = "/internal/media/"
_CHAT_PATH = "/v1/chat/completions"


class _Here:
    """This process; its folder is None until `install`."""

    folder: Path | None = None
    instance = ""
    parties: frozenset[Party] = frozenset()
    seen: ClassVar[set[str]] = set()


def point_name(step: str, moment: str) -> str:
    return f"{step}.{moment}"


def reach(step: str, moment: str) -> None:
    """This process is at the point. Returns at once unless a test has armed it."""
    folder = _Here.folder
    if folder is None:
        return
    point = point_name(step, moment)
    if point not in _Here.seen:
        _Here.seen.add(point)
        (folder / SEEN / point).touch()
    try:
        (folder / point).unlink()
    except FileNotFoundError:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(CONTROL_LIMIT_S)
        control.connect(str(folder / CONTROL_SOCKET))
        control.sendall(f"{_Here.instance} {point}\n".encode())
        control.recv(1)  # the test lets us go on


def install(folder: Path, instance: str, party: Party) -> None:
    """Notice the steps of this process from now on. Before the service starts."""
    _Here.folder, _Here.instance, _Here.parties = folder, instance, frozenset({party})
    if party is Party.PREFILL:
        _Here.parties |= {Party.PREFILL_DECODE}
    if party is Party.CACHE_STORE:
        _watch_store()
        return
    _watch_streams()
    _watch_sessions()
    _watch_http_client(party)
    if party is Party.GATEWAY:
        _watch_gateway_app()


# ---- which step is it ----------------------------------------------------------------------------
def _process_of(party: Party) -> Party:
    """A fabric agent is a source's and a target's."""
    return Party.SOURCE_AGENT if party is Party.TARGET_AGENT else party


_STREAM_STEPS = [each for each in STEPS if each.channel is Channel.STREAM]
_COMMAND_STEPS: dict[tuple[Party, type[Message]], Step] = {
    (_process_of(each.sender), each.message): each
    for each in STEPS
    if each.channel is Channel.STORE and each.message is not None
}
_PUSH_STEPS: dict[tuple[Party, type[Message]], Step] = {
    (each.receiver, each.message): each
    for each in STEPS
    if each.channel is Channel.PUSH and each.message is not None
}


def _reach_message(stream: str, kind: str, body: Mapping[str, Any], moment: str) -> None:
    """A message of a stream. Its reader does not know its writer: every point that it can be is reached."""
    attribute = stream.split(":")[2].replace("-", "_")
    variant = body.get("decision", body.get("outcome"))
    for each in _STREAM_STEPS:
        is_it = (each.stream, each.message and each.message.TYPE, each.variant) == (attribute, kind, variant)
        if is_it and (each.sender in _Here.parties or moment in (RECEIVED, HANDLED)):
            reach(each.name, moment)


def _reach_entry(stream: str, fields: Mapping[bytes, bytes], moment: str) -> None:
    _reach_message(stream, fields[b"type"].decode(), orjson.loads(fields[b"body"]), moment)


def _party_of_client(client: str) -> Party:
    """Of a store session's name, `{instance}/{part}`."""
    instance, _, part = client.partition("/")
    is_worker = part.startswith("worker")
    if instance.startswith("encoder"):
        return Party.ENCODER_WORKER if is_worker else Party.ENCODER
    if "prefill" in instance:  # of whatever role: the same, towards the store
        return Party.PREFILL_DECODE_WORKER if is_worker else Party.PREFILL_DECODE
    if instance.startswith("fabric"):
        return Party.SOURCE_AGENT
    return Party.OPERATOR


def _reach_command(client: str, command: StoreCommand, moment: str) -> None:
    found = _COMMAND_STEPS.get((_party_of_client(client), type(command)))
    if found is not None:
        reach(found.name, moment)


def _reach_push(client: str, push: object, moment: str) -> None:
    if isinstance(push, EntrySealed | WriterLost):
        found = _PUSH_STEPS.get((_party_of_client(client), type(push)))
        if found is not None:
            reach(found.name, moment)


# ---- around the bus ------------------------------------------------------------------------------
def _watch_streams() -> None:
    bus: Any = asyncbus.AsyncBus
    taker: Any = consumer.StreamConsumer
    flights: Any = SingleFlight
    publish, publish_encoded = bus.publish, bus.publish_encoded
    publish_job, claim_flight = flights.publish_job, flights.claim_flight
    take_within, take_spare, ack, ack_soon = (
        taker.take_within, taker.take_spare, taker.ack, taker.ack_soon,
    )  # fmt: skip

    async def watched_publish(self: Any, stream: str, message: Message, **options: Any) -> Any:
        body = message.model_dump(mode="json", include={"decision", "outcome"})
        _reach_message(stream, message.TYPE, body, SENDING)
        result = await publish(self, stream, message, **options)
        _reach_message(stream, message.TYPE, body, SENT)
        return result

    async def watched_publish_encoded(self: Any, entries: Any) -> Any:
        for stream, fields in entries:
            _reach_entry(stream, fields, SENDING)
        result = await publish_encoded(self, entries)
        for stream, fields in entries:
            _reach_entry(stream, fields, SENT)
        return result

    def reach_job(flights: Any, offer: JobOffer, moment: str) -> None:
        job = offer.job
        _reach_message(flights._names.encode_jobs(job.namespace_digest, offer.store), job.TYPE, {}, moment)

    async def watched_publish_job(self: Any, offer: JobOffer) -> Any:
        reach_job(self, offer, SENDING)
        result = await publish_job(self, offer)
        reach_job(self, offer, SENT)
        return result

    async def watched_claim(
        self: Any, mm_hash: str, requesters: Any, *, offer: JobOffer | None = None, **options: Any
    ) -> Any:
        if offer is not None:
            reach_job(self, offer, SENDING)
        claim = await claim_flight(self, mm_hash, requesters, offer=offer, **options)
        if offer is not None and claim.entry_id:
            reach_job(self, offer, SENT)
        return claim

    async def watched_take(self: Any, block_ms: int) -> Any:
        return received(await take_within(self, block_ms))

    async def watched_take_spare(self: Any, slots: Any) -> Any:
        return received(await take_spare(self, slots))

    def received(delivery: Any) -> Any:
        if delivery is not None:
            _reach_entry(delivery.stream, delivery.entry.fields, RECEIVED)
        return delivery

    async def watched_ack(self: Any, entry: Any) -> Any:
        _reach_entry(self._group.stream, entry.fields, HANDLED)
        return await ack(self, entry)

    bus.publish, bus.publish_encoded = watched_publish, watched_publish_encoded
    flights.publish_job, flights.claim_flight = watched_publish_job, watched_claim

    def watched_ack_soon(self: Any, entry: Any) -> None:
        _reach_entry(self._group.stream, entry.fields, HANDLED)
        ack_soon(self, entry)

    taker.take_within, taker.take_spare = watched_take, watched_take_spare
    taker.ack, taker.ack_soon = watched_ack, watched_ack_soon


# ---- around the store's sessions -----------------------------------------------------------------
def _watch_sessions() -> None:
    for session_class in (AsyncStoreSession, StoreSession):
        _watch_session(session_class)


def _watch_session(session_class: Any) -> None:
    submit, connect = session_class.submit, session_class.connect.__func__

    def watched_submit(self: Any, command: StoreCommand) -> Any:
        client = self._state._client_name
        _reach_command(client, command, SENDING)
        result = submit(self, command)
        _reach_command(client, command, SENT)
        return result

    def watched_connect(cls: Any, /, path: Any, client: str, **options: Any) -> Any:
        on_push: Callable[[object], None] | None = options.get("on_push")
        if on_push is not None:

            def watched_push(push: object) -> None:
                _reach_push(client, push, RECEIVED)
                on_push(push)

            options["on_push"] = watched_push
        return connect(cls, path, client, **options)

    session_class.submit = watched_submit
    session_class.connect = classmethod(watched_connect)


# ---- inside the store ----------------------------------------------------------------------------
def _watch_store() -> None:
    from triptych_cache_store.core.store_core import StoreCore
    from triptych_cache_store.server import Connections

    core: Any = StoreCore
    connections: Any = Connections
    handle, deliver = core.handle, connections.deliver
    clients: dict[int, str] = {}

    def watched_handle(self: Any, session_id: int, command: StoreCommand, now: float) -> Any:
        if isinstance(command, Hello):
            clients[session_id] = command.client
        client = clients.get(session_id, "")
        _reach_command(client, command, RECEIVED)
        result = handle(self, session_id, command, now)
        _reach_command(client, command, HANDLED)  # carried out, not answered yet
        return result

    def watched_deliver(self: Any, outgoing: Any) -> Any:
        outgoing = list(outgoing)
        for session_id, reply, _ in outgoing:
            _reach_push(clients.get(session_id, ""), reply, SENDING)
        return deliver(self, outgoing)

    core.handle, connections.deliver = watched_handle, watched_deliver


# ---- HTTP ----------------------------------------------------------------------------------------
def _watch_http_client(party: Party) -> None:
    if party is Party.GATEWAY:
        _watch_dispatch()
    elif party is Party.ENCODER:
        _watch_media_fetch()


def _watch_dispatch() -> None:
    from triptych_gateway.proxy import upstream

    module: Any = upstream
    open_response = module.open_response

    async def watched_open(*args: Any) -> Any:
        step = _dispatch_step(args[2])
        reach(step, SENDING)
        response = await open_response(*args)
        reach(step, SENT)
        if step == "prefill":
            reach("prefilled", RECEIVED)
        return response

    module.open_response = watched_open


def _dispatch_step(body: bytes) -> str:
    if b'"do_remote_decode":true' in body:
        return "prefill"
    return "decode" if b'"do_remote_prefill":true' in body else "dispatch"


def _watch_media_fetch() -> None:
    client: Any = httpx.AsyncClient
    send = client.send

    async def watched_send(self: Any, request: httpx.Request, **options: Any) -> Any:
        if not request.url.path.startswith(_MEDIA_PATH):
            return await send(self, request, **options)
        reach("fetch_media", SENDING)
        response = await send(self, request, **options)
        reach("fetch_media", SENT)
        return response

    client.send = watched_send


def _watch_gateway_app() -> None:
    from triptych_gateway import service

    module: Any = service
    create_app = module.create_app
    module.create_app = lambda gateway: _WatchedApp(create_app(gateway))


class _WatchedApp:
    """ASGI: the gateway's answers begin with prefill_decode's first event."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if path.startswith(_MEDIA_PATH):
            reach("fetch_media", RECEIVED)
        if not path.startswith(_CHAT_PATH):
            await self._app(scope, receive, send)
            return

        async def watched_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reach("first_token", RECEIVED)
            elif not message.get("more_body"):
                reach("answer", SENDING)
            await send(message)

        async def watched_receive() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                reach("disconnect", RECEIVED)
            return message

        reach("request", RECEIVED)
        await self._app(scope, watched_receive, watched_send)
