"""HTTP exchange of one forwarded request, from its first byte to its last.

    admitted -> read -> parsed -> [media: `multimodal_request`] -> forwarded -> first chunk -> end

`ChatExchange` is a chat's, `AudioExchange` that of a form with audio, `TextExchange` any other's.

Until the first chunk nothing is sent to the client, so every failure is a proper HTTP error; after
it, an error event in the stream. A client that goes away cancels all of it, which aborts the request
at prefill_decode and gives back the places and the media that it held.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Generic, LiteralString, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import Modality
from triptych_common.telemetry import get_logger
from triptych_common.telemetry.tracing import random_id
from triptych_gateway.access.auth import ANONYMOUS
from triptych_gateway.access.key_limits import PRIORITY_FIELD, RequestDemand
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.decision.decision_policy import ENCODE_HEADER
from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint
from triptych_gateway.errors import error_event, error_response
from triptych_gateway.proxy.audio_request import AudioRequest, read_audio_request
from triptych_gateway.proxy.context import RequestContext, UpstreamRequest
from triptych_gateway.proxy.multimodal_request import MultimodalRequest
from triptych_gateway.proxy.routing import chat_routing, session_of, text_routing
from triptych_gateway.proxy.services import Services
from triptych_gateway.proxy.streaming import ClientStream
from triptych_gateway.proxy.upstream_body import text_body
from triptych_gateway.race import Guard, StepTimer
from triptych_gateway.request.body_splitter import SplitBody
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.request_body import body_timeout, header_of, read_body, wait_disconnect
from triptych_gateway.request.text_request import TextRequest, read_text_request
from triptych_gateway.tracing.request_span import RequestSpan, request_span
from triptych_gateway.tracing.trace_trust import address_of

log = get_logger(__name__)

Request = TypeVar("Request", bound=ChatRequest | TextRequest | AudioRequest)

CLIENT_CLOSED_REQUEST = 499
ERROR_TIMEOUT_S = 1.0  # for a client that may have stopped reading


class Exchange(ABC, Generic[Request]):
    """One forwarded request as ASGI delivers it; `run` serves it."""

    def __init__(
        self, endpoint: Endpoint, services: Services, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._endpoint, self._services = endpoint, services
        self._scope, self._receive, self._send = scope, receive, send
        self._arrived_at = time.monotonic()
        self._request_id = RequestId(f"req-{random_id().hex()}")
        self._caller = ANONYMOUS
        self._asked_model = ""  # the name that the caller has for it; "": none
        self._echo: dict[str, str] = {"X-Request-Id": self._request_id}
        if endpoint.chat_form is ChatForm.MESSAGES:
            self._echo["Request-Id"] = self._request_id  # as Anthropic's clients read it

    async def run(self) -> None:
        """Serve the request to the end of its answer, good or not."""
        metrics = self._services.metrics
        client = ClientStream(self._send, self._echo)
        status = 200
        with request_span(
            self._request_id,
            operation=self._endpoint.operation,
            route=self._endpoint.path,
            scope=self._scope,
            arrived_at=self._arrived_at,
            context=self._services.access.trace_trust.context_of(self._scope),
        ) as root:
            try:
                await self._run(client, root)
            except ClientDisconnect:
                status = CLIENT_CLOSED_REQUEST
                root.on_error("client_disconnected")
                metrics.disconnects.inc()
                self._log_refusal("client went away", "", request_id=self._request_id)
            except RequestError as error:
                root.on_error(error.code)
                status = await self._answer_error(error, client)
            except Exception:
                log.exception("request failed", request_id=self._request_id, **self._caller.fields)
                internal = RequestError(500, "internal_error", "the gateway failed to serve this request")
                root.on_error(internal.code)
                status = await self._answer_error(internal, client)
            root.end(status)
        metrics.requests.labels(self._endpoint.path, str(status)).inc()
        metrics.duration_s.observe(time.monotonic() - self._arrived_at)

    @abstractmethod
    async def _read(self, booking: Booking, guard: Guard) -> Request:
        """Read and check the request as it arrives."""

    @abstractmethod
    async def _serve(
        self, request: Request, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        """Serve a request to the end of a good answer."""

    async def _run(self, client: ClientStream, root: RequestSpan) -> None:
        services, access = self._services, self._services.access
        authorization = header_of(self._scope, b"authorization")
        self._caller = access.api_keys.check_key(authorization, self._plain_key())
        for name, value in self._caller.fields.items():
            root.set_attribute(f"triptych.{name}", value)
        if services.recents is not None:
            owner, key_name = self._caller.owner, self._caller.key_name
            root.show_in(
                services.recents, self._request_id, self._endpoint.path, owner=owner, key_name=key_name
            )
        with access.limiter.hold_request(), access.limiter.hold_bytes() as booking, Guard() as guard:
            request = await self._read(booking, guard)
            demand = access.routing_headers.read(
                self._scope, self._caller, request.body, self._endpoint.inputs, self._request_id
            )
            request = cast("Request", request.of_tenant(self._caller.salt))  # of its own class
            root.on_request(request.body, stream=request.stream, num_items=len(request.media))
            deadline = self._arrived_at + services.settings.first_token_timeout_s
            header = services.instances.models.content.session_header
            context = RequestContext(
                self._request_id,
                self._caller,
                root,
                self._arrived_at,
                deadline,
                session=session_of(self._scope, request.body, self._caller.salt, header),
                encode_header=header_of(self._scope, ENCODE_HEADER.lower().encode()),
                demand=demand,
            )
            loop = asyncio.get_running_loop()
            watch = loop.create_task(self._watch_client(client, guard))
            limit = loop.call_later(services.settings.request_timeout_s, lambda: guard.fail(_took_too_long()))
            try:
                with services.cut_off.hold(guard):
                    await self._serve_counted(request, context, booking, client)
            finally:
                limit.cancel()
                watch.cancel()
                with suppress(
                    asyncio.CancelledError
                ):  # its own; one from outside finds the exchange at its end
                    await watch

    async def _serve_chat(
        self, request: ChatRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        """Serve a chat whose model is there, with media or without."""
        if request.media:
            await MultimodalRequest(self._services, request, context, booking, client).serve()
            return
        routing = chat_routing(request, context.session)
        upstream = UpstreamRequest(
            context, request, text_body(request), endpoint=self._endpoint, routing=routing
        )
        await self._services.forwarder.forward(upstream, client)

    def _resolve(self, name: str) -> str:
        self._asked_model = name
        return self._services.instances.models.resolve(name)

    async def _wait_model(self, model: str, context: RequestContext) -> None:
        """Wait until an instance serves `model` as the request demands it."""
        await self._services.instances.wait_model(model)
        await self._services.instances.check_demand(model, context.demand)
        context.root.on_model(model)

    def _plain_key(self) -> str | None:
        """Return the key from the header of Anthropic's clients."""
        if self._endpoint.chat_form is not ChatForm.MESSAGES:
            return None
        return header_of(self._scope, b"x-api-key")

    async def _read_body(self, booking: Booking, guard: Guard) -> SplitBody:
        with self._body_time(booking, guard) as on_growth:
            max_bytes = self._services.settings.max_body_bytes
            return await read_body(self._scope, self._receive, max_bytes=max_bytes, on_growth=on_growth)

    @contextmanager
    def _body_time(self, booking: Booking, guard: Guard) -> Iterator[Callable[[int], None]]:
        """Refuse, by `guard`, a client that sends too slowly while the block runs.

        Yields the function to call with the body's size at each piece.
        """
        loop = asyncio.get_running_loop()
        limit = loop.call_later(self._services.settings.body_timeout_s, lambda: guard.fail(body_timeout()))
        try:
            with StepTimer(guard, self._services.settings.body_piece_timeout_s) as timer:

                def on_growth(num_bytes: int) -> None:
                    timer.begin_step(body_timeout)  # the next piece
                    booking.resize(num_bytes)

                timer.begin_step(body_timeout)
                yield on_growth
        finally:
            limit.cancel()

    async def _watch_client(self, client: ClientStream, guard: Guard) -> None:
        """Wait until the answer has ended; fail `guard` if the client goes away first."""
        try:
            await wait_disconnect(self._receive, lambda: client.has_ended)
        except ClientDisconnect as error:
            guard.fail(error)

    async def _serve_counted(
        self, request: Request, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        limits = self._caller.limits
        if not request.model:  # the caller has named none
            model = self._services.instances.only_model(self._caller.may_use)
            request = replace(request, model=model)
        if limits is None:
            await self._serve(request, context, booking, client)
            return
        if limits.priority is not None and self._endpoint.is_computed:
            request = replace(request, body=limits.with_priority(request.body))
            context = replace(context, priority=request.body[PRIORITY_FIELD])
        models = self._services.instances.models
        permitted = models.permitted_name(request.model, self._asked_model, limits.allows_model)
        demand = RequestDemand(
            permitted or self._asked_model or request.model,
            request.body,
            request.num_prompt_bytes,
            request.num_media_bytes,
            takes_stream_options=self._endpoint.takes_stream_options,
        )
        limiter = self._services.access.key_limiter
        async with limiter.hold_request(self._caller, limits, demand, self._echo) as charge:
            client.send_by(charge.meter)
            counted = replace(request, body=charge.body)
            await self._serve(counted, replace(context, charge=charge), booking, client)

    async def _answer_error(self, error: RequestError, client: ClientStream) -> int:
        address = address_of(self._scope)
        self._log_refusal(
            "request refused",
            error.code,
            request_id=self._request_id,
            status=error.status_code,
            code=error.code,
            param=error.param,
            client=None if address is None else str(address),
        )
        form = self._endpoint.chat_form
        try:
            async with asyncio.timeout(ERROR_TIMEOUT_S):
                if client.has_headers:
                    await client.end_answer(error_event(error, form))
                else:
                    answer = error_response(error, self._echo, form)
                    await answer(self._scope, self._receive, self._send)
        except (TimeoutError, ClientDisconnect):
            self._log_refusal("client does not read", "", request_id=self._request_id)
        return error.status_code

    def _log_refusal(self, text: LiteralString, reason: str, /, **fields: object) -> None:
        """Log a refusal. Lines are limited per reason and key, since callers without a key cause them too."""
        key_name = self._caller.key_name or ""
        self._services.refusals.info(text, reason, key_name, **fields, **self._caller.fields)


class ChatExchange(Exchange[ChatRequest]):
    """Exchange of a chat in any form, perhaps with media."""

    async def _read(self, booking: Booking, guard: Guard) -> ChatRequest:
        body = await self._read_body(booking, guard)
        request = await self._services.parser.parse(body, booking.resize, self._endpoint)
        return request.with_model(self._resolve(request.model))

    async def _serve(
        self, request: ChatRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        await self._wait_model(request.model, context)
        await self._serve_chat(request, context, booking, client)


class TextExchange(Exchange[TextRequest]):
    """Exchange of a request without media."""

    async def _read(self, booking: Booking, guard: Guard) -> TextRequest:
        body = await self._read_body(booking, guard)
        request = await read_text_request(self._services.parser, body, booking.resize, self._endpoint)
        return request.with_model(self._resolve(request.model))

    async def _serve(
        self, request: TextRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        await self._wait_model(request.model, context)
        upstream = UpstreamRequest(
            context,
            request,
            text_body(request),
            endpoint=self._endpoint,
            routing=text_routing(request, context.session),
        )
        await self._services.forwarder.forward(upstream, client)


class AudioExchange(Exchange[AudioRequest]):
    """Exchange of an audio form, written anew for an instance that encodes audio itself."""

    async def _read(self, booking: Booking, guard: Guard) -> AudioRequest:
        with self._body_time(booking, guard) as on_growth:
            request = await read_audio_request(
                self._scope,
                self._receive,
                self._endpoint,
                max_bytes=self._services.settings.max_body_bytes,
                on_growth=on_growth,
                resolve=self._resolve,
            )
        limits = self._caller.limits
        if limits is not None and limits.tokens_per_minute is not None:
            request.check_count()
        return request

    async def _serve(
        self, request: AudioRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        instances = self._services.instances
        await self._wait_model(request.model, context)
        if request.has_salt or not instances.encodes_sounds(request.model):
            path = self._endpoint.path
            raise RequestError(404, "endpoint_not_served", f"this model does not serve {path}", "model")
        upstream = UpstreamRequest(
            context,
            request,
            request.form,
            needs_tower=True,
            takes=frozenset({Modality.AUDIO}),
            endpoint=self._endpoint,
            content_type=request.content_type,
        )
        await self._services.forwarder.forward(upstream, client)


def _took_too_long() -> RequestError:
    return RequestError(504, "deadline_exceeded", "the request took longer than is allowed")
