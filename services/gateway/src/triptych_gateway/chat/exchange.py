"""One chat completion, from its first byte to its last.

    admitted -> read -> parsed -> [media taken -> sizes known] -> sent to prefill_decode -> first chunk -> end
                                        |             |                    |
                                        `-- encoders cannot be had --------+--> whole, to one with a tower

Until the first chunk nothing is sent to the client, so every failure is a proper HTTP error; after
it, an error event in the stream. A client that goes away cancels all of it, which aborts the request
at prefill_decode and gives back the places and the media that it held.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TypeVar
from uuid import uuid4

from opentelemetry.trace import Span, StatusCode
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope
from starlette.types import Send as AsgiSend

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import InstanceRecord
from triptych_common.telemetry import current_traceparent, get_logger, span
from triptych_gateway.access.admission import Booking
from triptych_gateway.access.callers import ANYBODY
from triptych_gateway.chat.forward import Dispatch, serve
from triptych_gateway.chat.race import race
from triptych_gateway.chat.streaming import ClientStream, end_with_error
from triptych_gateway.chat.upstream_body import check_fits, media_body, text_body, whole_body
from triptych_gateway.encode.encode_wait import EncodeWait
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.gateway import Gateway, unknown_model
from triptych_gateway.openai_errors import EncodeUnavailableError, error_response
from triptych_gateway.request.chat_request import ChatRequest, parse_chat_request
from triptych_gateway.request.media import TakenItem, take_media
from triptych_gateway.request.prompt_length import check_text
from triptych_gateway.request.request_body import read_body, wait_disconnect
from triptych_gateway.routing.router import choose_namespace

log = get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
LAST_WORD_S = 1.0  # for a client that may have stopped reading
Chosen = TypeVar("Chosen")
PARSE_INLINE_BYTES = 32 << 10  # larger bodies are parsed in a thread: the event loop goes on


class ChatExchange(Response):
    """The response object of the chat route; all the work happens when it is called."""

    def __init__(self, gateway: Gateway, request: Request) -> None:
        super().__init__()
        self._gateway = gateway
        self._settings = gateway.settings
        self._request = request
        self._arrived_at = time.monotonic()
        self._request_id = RequestId(f"req-{uuid4().hex}")
        self._caller = ANYBODY
        self._echo: dict[str, str] = {"X-Request-Id": self._request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        client = ClientStream(send, self._settings.chunk_timeout_s)
        status = 200
        attributes = {"triptych.request_id": self._request_id}
        # traceparent="": a root of its own, whatever the client sends
        with span("gateway.request", attributes=attributes, traceparent="") as root:
            try:
                await self._run(client, root)
            except ClientDisconnect:
                status = CLIENT_CLOSED_REQUEST
                self._gateway.metrics.disconnects.inc()
                log.info("client went away", request_id=self._request_id, **self._caller.fields)
            except RequestError as error:
                status = await self._answer_error(error, client, scope, receive, send)
            except Exception:
                log.exception("request failed", request_id=self._request_id, **self._caller.fields)
                internal = RequestError(500, "internal_error", "the gateway failed to serve this request")
                status = await self._answer_error(internal, client, scope, receive, send)
            root.set_attribute("http.response.status_code", status)
            if status >= 500:
                root.set_status(StatusCode.ERROR)
        self._gateway.metrics.requests.labels(str(status)).inc()
        self._gateway.metrics.duration_s.observe(time.monotonic() - self._arrived_at)

    async def _answer_error(
        self, error: RequestError, client: ClientStream, scope: Scope, receive: Receive, send: AsgiSend
    ) -> int:
        log.info(
            "request refused",
            request_id=self._request_id,
            status=error.status_code,
            code=error.code,
            param=error.param,
            **self._caller.fields,
        )
        try:
            async with asyncio.timeout(LAST_WORD_S):
                if client.has_begun:
                    await end_with_error(client, error)
                else:
                    await error_response(error, self._echo)(scope, receive, send)
        except (TimeoutError, ClientDisconnect):
            log.info("client does not read", request_id=self._request_id)
        return error.status_code

    async def _run(self, client: ClientStream, root: Span) -> None:
        gateway, settings = self._gateway, self._settings
        self._caller = gateway.api_keys.check(self._request.headers.get("authorization"))
        for name, value in self._caller.fields.items():
            root.set_attribute(f"triptych.{name}", value)
        with ExitStack() as held:
            held.enter_context(gateway.admission.request())
            held.enter_context(gateway.metrics.in_flight.track_inprogress())
            booking = held.enter_context(gateway.admission.media())
            raw = await read_body(
                self._request,
                max_bytes=settings.max_body_bytes,
                timeout_s=settings.body_timeout_s,
                on_growth=booking.resize,
            )
            request = (await self._parse(raw)).of_tenant(self._caller.salt)
            del raw
            root.set_attribute("triptych.num_items", len(request.media))
            root.set_attribute("triptych.stream", request.stream)
            await race(
                self._serve(request, booking, client, root),
                wait_disconnect(self._request, lambda: client.has_ended),
                gateway.wait_cut_off(),
            )

    async def _parse(self, raw: bytearray) -> ChatRequest:
        gateway = self._gateway
        parse = partial(
            parse_chat_request,
            raw,
            gateway.placeholder_guard,
            self._settings.max_items,
            gateway.request_limits,
            gateway.request_options,
        )
        if len(raw) <= PARSE_INLINE_BYTES:
            return parse()
        return await asyncio.get_running_loop().run_in_executor(gateway.body_threads, parse)

    async def _serve(self, request: ChatRequest, booking: Booking, client: ClientStream, root: Span) -> None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_s):
                view = self._gateway.view
                await self._when_served(request.model, lambda: request.model in view.models or None)
                if request.media:
                    await self._serve_media(request, booking, client, root)
                else:
                    await serve(self._gateway, self._dispatch(request, None, text_body(request)), client)
        except TimeoutError as error:
            raise RequestError(504, "deadline_exceeded", "the request took longer than is allowed") from error

    async def _when_served(self, model: str, choose: Callable[[], Chosen | None]) -> Chosen:
        """What `choose` finds, now or soon: a model that was served before comes back.

        Its instances restart, or Redis lost its data and they register again.
        """
        view = self._gateway.view
        try:
            async with asyncio.timeout(self._settings.instance_grace_s):
                while (chosen := choose()) is None:
                    if model not in view.models_seen:
                        raise unknown_model(self._gateway, model)
                    await view.wait_for_look()
        except TimeoutError as error:
            raise unknown_model(self._gateway, model) from error
        return chosen

    async def _serve_media(
        self, request: ChatRequest, booking: Booking, client: ClientStream, root: Span
    ) -> None:
        gateway = self._gateway
        digest = await self._when_served(
            request.model, lambda: choose_namespace(gateway.view.records, request.model)
        )
        with span("gateway.media", attributes={"triptych.num_items": len(request.media)}):
            items = await take_media(
                request.media,
                namespace_digest=digest,
                processor_options=request.processor_options,
                media_io_options=request.media_io_options,
                tenant_salt=request.tenant_salt,
                limits=gateway.media_limits,
                threads=gateway.media_threads,
                on_taken=request.drop_text,
            )
        contents = {item.mm_hash: len(item.content) for item in items}
        booking.resize(min(booking.num_bytes, request.num_prompt_bytes + sum(contents.values())))
        await self._serve_items(request, items, digest, client, root)

    async def _serve_items(
        self,
        request: ChatRequest,
        items: tuple[TakenItem, ...],
        digest: str,
        client: ClientStream,
        root: Span,
    ) -> None:
        gateway = self._gateway
        chosen = await self._when_served(
            request.model,
            lambda: gateway.router.pick(
                gateway.view.records,
                model=request.model,
                namespace_digest=digest,
                exclude=frozenset(),
                now=time.monotonic(),
            ),
        )
        ticket = MediaWait(
            self._request_id,
            chosen.instance,
            items,
            self._first_token_deadline,
            current_traceparent(),
            digest,
            chosen.max_model_len,
        )
        wait = EncodeWait(
            self._settings,
            gateway.view,
            gateway.orders,
            ticket,
            model=request.model,
            namespace_digest=digest,
        )
        # In this order: from the moment it is open, metadata may name the request, and it lives.
        async with gateway.last_words.of(ticket), gateway.orders.open(ticket):
            try:
                await self._serve_encoded(request, ticket, wait, chosen, client)
            except EncodeUnavailableError as error:
                is_too_late = client.has_begun or time.monotonic() >= ticket.deadline
                if is_too_late or not wait.has_other_way:
                    raise
                reason = error.code
            else:
                return
        # The ticket is closed: what encoders still do is for others, and they need not wait for us.
        await self._serve_whole(request, ticket, client, root, reason)

    async def _serve_encoded(
        self,
        request: ChatRequest,
        ticket: MediaWait,
        wait: EncodeWait,
        chosen: InstanceRecord,
        client: ClientStream,
    ) -> None:
        """With the items that encoders make."""
        with span("gateway.encode_wait"):
            ticket.raise_failure()
            if self._gateway.orders.lacks_job(ticket):
                await check_text(
                    self._gateway.http, chosen, request, ticket.num_rows, self._settings.tokenize_timeout_s
                )
            await wait.sizes()
        check_fits(ticket.items, ticket.sizes, chosen)
        body = media_body(
            request,
            ticket.items,
            ticket.sizes,
            request_id=self._request_id,
            gateway=self._settings.instance,
            traceparent=ticket.traceparent,
            remaining_ms=int((ticket.deadline - time.monotonic()) * 1000),
        )
        dispatch = self._dispatch(request, ticket.namespace_digest, body)
        dispatch.ticket, dispatch.first_choice = ticket, chosen
        await race(serve(self._gateway, dispatch, client), ticket.wait_failure(), wait.hopeless())

    async def _serve_whole(
        self, request: ChatRequest, ticket: MediaWait, client: ClientStream, root: Span, reason: str
    ) -> None:
        """With the raw media, by an instance that encodes them."""
        gateway = self._gateway
        log.warning(
            "request is encoded by its prefill_decode",
            request_id=self._request_id,
            reason=reason,
            **self._caller.fields,
        )
        gateway.metrics.local_encodes.labels(reason).inc()
        root.set_attribute("triptych.local_encode", reason)
        with span("gateway.local_encode", attributes={"triptych.reason": reason}):
            body = await asyncio.get_running_loop().run_in_executor(
                gateway.body_threads, whole_body, request, ticket.items
            )
            dispatch = self._dispatch(request, ticket.namespace_digest, body)
            dispatch.needs_tower = True
            await serve(gateway, dispatch, client)

    @property
    def _first_token_deadline(self) -> float:
        return self._arrived_at + self._settings.first_token_timeout_s

    def _dispatch(self, request: ChatRequest, digest: str | None, body: bytes) -> Dispatch:
        return Dispatch(
            request_id=self._request_id,
            model=request.model,
            stream=request.stream,
            namespace_digest=digest,
            body=body,
            has_media=bool(request.media),
            response_headers=self._echo,
            arrived_at=self._arrived_at,
            first_token_deadline=self._first_token_deadline,
        )
