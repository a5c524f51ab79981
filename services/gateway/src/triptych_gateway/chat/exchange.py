"""HTTP exchange of one forwarded request, from its first byte to its last.

    admitted -> read -> parsed -> [media served by `media_serving`] -> forwarded -> first chunk -> end

`ChatExchange` is a chat's, `SoundExchange` that of a form with a sound, `TextExchange` any other's.

Until the first chunk nothing is sent to the client, so every failure is a proper HTTP error; after
it, an error event in the stream. A client that goes away cancels all of it, which aborts the request
at prefill_decode and gives back the places and the media that it held.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Generic, LiteralString, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.protocol.messages import Modality
from triptych_common.telemetry import get_logger
from triptych_common.telemetry.limited_log import LimitedLog
from triptych_common.telemetry.random_ids import random_id
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.access.callers import ANONYMOUS
from triptych_gateway.access.key_limiter import KeyLimiter
from triptych_gateway.access.key_limits import PRIORITY_FIELD, RequestDemand
from triptych_gateway.access.request_limiter import Booking, RequestLimiter
from triptych_gateway.chat.dispatch import Arrival, Dispatch
from triptych_gateway.chat.forward import Forwarder
from triptych_gateway.chat.media_serving import MediaServing
from triptych_gateway.chat.routing import chat_routing, session_of, text_routing
from triptych_gateway.chat.routing_headers import RoutingHeaders
from triptych_gateway.chat.sound_request import SoundRequest, read_sound_request
from triptych_gateway.chat.streaming import ClientStream
from triptych_gateway.chat.upstream_body import text_body
from triptych_gateway.decision.encode_override import ENCODE_HEADER
from triptych_gateway.endpoints.endpoint import ChatForm, Endpoint
from triptych_gateway.errors import error_event, error_response
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import CutOff, Guard, StepTimer
from triptych_gateway.request.chat_request import ChatRequest, RequestParser
from triptych_gateway.request.request_body import body_timeout, header_of, read_body, wait_disconnect
from triptych_gateway.request.split.split_body import SplitBody
from triptych_gateway.request.text_request import TextParser, TextRequest
from triptych_gateway.routing.instances import Instances
from triptych_gateway.tracing.recent_requests import RecentRequests
from triptych_gateway.tracing.request_span import RequestSpan, request_span
from triptych_gateway.tracing.trace_trust import TraceTrust, address_of

log = get_logger(__name__)

Request = TypeVar("Request", bound=ChatRequest | TextRequest | SoundRequest)

CLIENT_CLOSED_REQUEST = 499
ERROR_TIMEOUT_S = 1.0  # for a client that may have stopped reading


@dataclass(frozen=True, slots=True)
class ChatParts:
    """Parts that all exchanges of a gateway share, in the order in which a request needs them."""

    metrics: GatewayMetrics
    trace_trust: TraceTrust
    routing_headers: RoutingHeaders
    api_keys: ApiKeys
    limiter: RequestLimiter
    key_limiter: KeyLimiter
    max_body_bytes: int
    body_timeout_s: float
    body_piece_timeout_s: float
    parser: RequestParser
    text_parser: TextParser
    first_token_timeout_s: float
    request_timeout_s: float
    instances: Instances
    media_serving: MediaServing
    forwarder: Forwarder
    chunk_timeout_s: float
    cut_off: CutOff  # ends requests when the time to drain is over
    recents: RecentRequests | None = None  # None: the page at `/ui` is off
    refusals: LimitedLog = field(default_factory=lambda: LimitedLog(log))


class Exchange(ABC, Generic[Request]):
    """One forwarded request as ASGI delivers it; `run` serves it."""

    def __init__(
        self, endpoint: Endpoint, parts: ChatParts, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._endpoint, self._parts = endpoint, parts
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
        metrics = self._parts.metrics
        client = ClientStream(self._send, self._echo)
        status = 200
        with request_span(
            self._request_id,
            operation=self._endpoint.operation,
            route=self._endpoint.path,
            scope=self._scope,
            arrived_at=self._arrived_at,
            context=self._parts.trace_trust.context_of(self._scope),
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
    def _with_model(self, request: Request) -> Request:
        """Return the request with the name of its model, also if the caller has named none."""

    @abstractmethod
    async def _serve(
        self, request: Request, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        """Serve a request to the end of a good answer."""

    async def _run(self, client: ClientStream, root: RequestSpan) -> None:
        parts = self._parts
        self._caller = parts.api_keys.check_key(header_of(self._scope, b"authorization"), self._plain_key())
        for name, value in self._caller.fields.items():
            root.set_attribute(f"triptych.{name}", value)
        if parts.recents is not None:
            owner, key_name = self._caller.owner, self._caller.key_name
            root.show_in(parts.recents, self._request_id, self._endpoint.path, owner=owner, key_name=key_name)
        with parts.limiter.hold_request(), parts.limiter.hold_bytes() as booking, Guard() as guard:
            request = await self._read(booking, guard)
            demand = parts.routing_headers.read(
                self._scope, self._caller, request.body, self._endpoint.inputs, self._request_id
            )
            request = cast("Request", request.of_tenant(self._caller.salt))  # of its own class
            root.on_request(request.body, stream=request.stream, num_items=len(request.media))
            deadline = self._arrived_at + parts.first_token_timeout_s
            header = parts.instances.models.content.session_header
            arrival = Arrival(
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
            limit = loop.call_later(parts.request_timeout_s, lambda: guard.fail(_took_too_long()))
            try:
                with parts.cut_off.hold(guard):
                    await self._serve_counted(request, arrival, booking, client)
            finally:
                limit.cancel()
                watch.cancel()
                with suppress(
                    asyncio.CancelledError
                ):  # its own; one from outside finds the exchange at its end
                    await watch

    def _resolve(self, name: str) -> str:
        self._asked_model = name
        return self._parts.instances.models.resolve(name)

    async def _wait_model(self, model: str, arrival: Arrival) -> None:
        """Wait until an instance serves `model` as the request demands it."""
        await self._parts.instances.wait_model(model)
        await self._parts.instances.check_demand(model, arrival.demand)
        arrival.root.on_model(model)

    def _plain_key(self) -> str | None:
        """Return the key from the header of Anthropic's clients."""
        if self._endpoint.chat_form is not ChatForm.MESSAGES:
            return None
        return header_of(self._scope, b"x-api-key")

    async def _read_body(self, booking: Booking, guard: Guard) -> SplitBody:
        with self._body_time(booking, guard) as on_growth:
            max_bytes = self._parts.max_body_bytes
            return await read_body(self._scope, self._receive, max_bytes=max_bytes, on_growth=on_growth)

    @contextmanager
    def _body_time(self, booking: Booking, guard: Guard) -> Iterator[Callable[[int], None]]:
        """Refuse, by `guard`, a client that sends too slowly while the block runs.

        Yields the function to call with the body's size at each piece.
        """
        loop = asyncio.get_running_loop()
        limit = loop.call_later(self._parts.body_timeout_s, lambda: guard.fail(body_timeout()))
        try:
            with StepTimer(guard, self._parts.body_piece_timeout_s) as timer:

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
        self, request: Request, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        request, limits = self._with_model(request), self._caller.limits
        if limits is None:
            await self._serve(request, arrival, booking, client)
            return
        if limits.priority is not None and self._endpoint.is_computed:
            request = replace(request, body=limits.with_priority(request.body))
            arrival = replace(arrival, priority=request.body[PRIORITY_FIELD])
        models = self._parts.instances.models
        permitted = models.permitted_name(request.model, self._asked_model, limits.allows_model)
        demand = RequestDemand(
            permitted or self._asked_model or request.model,
            request.body,
            request.num_prompt_bytes,
            request.num_media_bytes,
            takes_stream_options=self._endpoint.takes_stream_options,
        )
        limiter = self._parts.key_limiter
        async with limiter.hold_request(self._caller, limits, demand, self._echo) as charge:
            client.send_by(charge.meter)
            counted = replace(request, body=charge.body)
            await self._serve(counted, replace(arrival, charge=charge), booking, client)

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
                if client.has_begun:
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
        self._parts.refusals.info(text, reason, key_name, **fields, **self._caller.fields)


class ChatExchange(Exchange[ChatRequest]):
    """Exchange of a chat in any form, perhaps with media."""

    async def _read(self, booking: Booking, guard: Guard) -> ChatRequest:
        body = await self._read_body(booking, guard)
        request = await self._parts.parser.parse(body, booking.resize, self._endpoint)
        return request.with_model(self._resolve(request.model))

    def _with_model(self, request: ChatRequest) -> ChatRequest:
        return request

    async def _serve(
        self, request: ChatRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        parts = self._parts
        await self._wait_model(request.model, arrival)
        if request.media:
            await parts.media_serving.serve(request, arrival, booking, client)
        else:
            dispatch = Dispatch(
                arrival,
                request,
                text_body(request),
                endpoint=self._endpoint,
                routing=chat_routing(request, arrival.session),
            )
            await parts.forwarder.forward(dispatch, client)


class TextExchange(Exchange[TextRequest]):
    """Exchange of a request without media."""

    async def _read(self, booking: Booking, guard: Guard) -> TextRequest:
        body = await self._read_body(booking, guard)
        request = await self._parts.text_parser.parse(body, self._endpoint, booking.resize)
        return request.with_model(self._resolve(request.model))

    def _with_model(self, request: TextRequest) -> TextRequest:
        return request.of_model(request.model or self._parts.instances.only_model(self._caller.may_use))

    async def _serve(
        self, request: TextRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        await self._wait_model(request.model, arrival)
        dispatch = Dispatch(
            arrival,
            request,
            text_body(request),
            endpoint=self._endpoint,
            routing=text_routing(request, arrival.session),
        )
        await self._parts.forwarder.forward(dispatch, client)


class SoundExchange(Exchange[SoundRequest]):
    """Exchange of an audio form, forwarded unchanged to an instance that encodes audio itself."""

    async def _read(self, booking: Booking, guard: Guard) -> SoundRequest:
        with self._body_time(booking, guard) as on_growth:
            request = await read_sound_request(
                self._scope,
                self._receive,
                self._endpoint,
                max_bytes=self._parts.max_body_bytes,
                on_growth=on_growth,
                resolve=self._resolve,
            )
        limits = self._caller.limits
        if limits is not None and limits.tokens_per_minute is not None:
            request.check_count()
        return request

    def _with_model(self, request: SoundRequest) -> SoundRequest:
        return request.of_model(request.model or self._parts.instances.only_model(self._caller.may_use))

    async def _serve(
        self, request: SoundRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        instances = self._parts.instances
        await self._wait_model(request.model, arrival)
        if request.has_salt or not instances.encodes_sounds(request.model):
            path = self._endpoint.path
            raise RequestError(404, "endpoint_not_served", f"this model does not serve {path}", "model")
        dispatch = Dispatch(
            arrival,
            request,
            request.form,
            needs_tower=True,
            takes=frozenset({Modality.AUDIO}),
            endpoint=self._endpoint,
            content_type=request.content_type,
        )
        await self._parts.forwarder.forward(dispatch, client)


def _took_too_long() -> RequestError:
    return RequestError(504, "deadline_exceeded", "the request took longer than is allowed")
