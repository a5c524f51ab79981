"""One chat completion over HTTP, from its first byte to its last.

    admitted -> read -> parsed -> [media served by `media_serving`] -> forwarded -> first chunk -> end

Until the first chunk nothing is sent to the client, so every failure is a proper HTTP error; after
it, an error event in the stream. A client that goes away cancels all of it, which aborts the request
at prefill_decode and gives back the places and the media that it held.
"""

import asyncio
import time
from contextlib import ExitStack
from dataclasses import dataclass
from uuid import uuid4

from opentelemetry.trace import Span, StatusCode
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import RequestId
from triptych_common.telemetry import get_logger, span
from triptych_gateway.access.auth import ApiKeys
from triptych_gateway.access.callers import ANONYMOUS
from triptych_gateway.access.request_limiter import Booking, RequestLimiter
from triptych_gateway.chat.forward import Arrival, Dispatch, Forwarder
from triptych_gateway.chat.media_serving import MediaServing
from triptych_gateway.chat.streaming import ClientStream
from triptych_gateway.chat.upstream_body import text_body
from triptych_gateway.errors import error_event, error_response, unavailable
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.race import race
from triptych_gateway.request.chat_request import ChatRequest, RequestParser
from triptych_gateway.request.request_body import read_body, wait_disconnect
from triptych_gateway.routing.instances import Instances

log = get_logger(__name__)

CLIENT_CLOSED_REQUEST = 499
ERROR_TIMEOUT_S = 1.0  # for a client that may have stopped reading


@dataclass(frozen=True, slots=True)
class ChatParts:
    """What the chat exchanges of a gateway share, in the order in which a request needs it."""

    metrics: GatewayMetrics
    api_keys: ApiKeys
    limiter: RequestLimiter
    max_body_bytes: int
    body_timeout_s: float
    parser: RequestParser
    first_token_timeout_s: float
    request_timeout_s: float
    instances: Instances
    media_serving: MediaServing
    forwarder: Forwarder
    chunk_timeout_s: float
    cut_off: asyncio.Event  # the time to drain is over


class ChatExchange(Response):
    """The response object of the chat route; all the work happens when it is called."""

    def __init__(self, parts: ChatParts, request: Request) -> None:
        super().__init__()
        self._parts = parts
        self._request = request
        self._arrived_at = time.monotonic()
        self._request_id = RequestId(f"req-{uuid4().hex}")
        self._caller = ANONYMOUS
        self._echo: dict[str, str] = {"X-Request-Id": self._request_id}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        metrics = self._parts.metrics
        client = ClientStream(send, self._echo, self._parts.chunk_timeout_s)
        status = 200
        attributes = {"triptych.request_id": self._request_id}
        # traceparent="": a root of its own, whatever the client sends
        with span("gateway.request", attributes=attributes, traceparent="") as root:
            try:
                await self._run(client, root)
            except ClientDisconnect:
                status = CLIENT_CLOSED_REQUEST
                metrics.disconnects.inc()
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
        metrics.requests.labels(str(status)).inc()
        metrics.duration_s.observe(time.monotonic() - self._arrived_at)

    async def _run(self, client: ClientStream, root: Span) -> None:
        parts = self._parts
        self._caller = parts.api_keys.check_key(self._request.headers.get("authorization"))
        for name, value in self._caller.fields.items():
            root.set_attribute(f"triptych.{name}", value)
        with ExitStack() as held:
            held.enter_context(parts.limiter.hold_request())
            held.enter_context(parts.metrics.in_flight.track_inprogress())
            booking = held.enter_context(parts.limiter.hold_bytes())
            raw = await read_body(
                self._request,
                max_bytes=parts.max_body_bytes,
                timeout_s=parts.body_timeout_s,
                on_growth=booking.resize,
            )
            request = (await parts.parser.parse(raw)).of_tenant(self._caller.salt)
            del raw
            root.set_attribute("triptych.num_items", len(request.media))
            root.set_attribute("triptych.stream", request.stream)
            deadline = self._arrived_at + parts.first_token_timeout_s
            arrival = Arrival(self._request_id, self._caller, root, self._arrived_at, deadline)
            await race(
                self._serve(request, arrival, booking, client),
                wait_disconnect(self._request, lambda: client.has_ended),
                self._wait_cut_off(),
            )

    async def _serve(
        self, request: ChatRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        parts = self._parts
        try:
            async with asyncio.timeout(parts.request_timeout_s):
                await parts.instances.wait_model(request.model)
                if request.media:
                    await parts.media_serving.serve(request, arrival, booking, client)
                else:
                    dispatch = Dispatch(arrival, request, text_body(request))
                    await parts.forwarder.forward(dispatch, client)
        except TimeoutError as error:
            raise RequestError(504, "deadline_exceeded", "the request took longer than is allowed") from error

    async def _wait_cut_off(self) -> None:
        """A guard: raises when the gateway waits for running requests no longer."""
        await self._parts.cut_off.wait()
        raise unavailable("draining", "this gateway is going away; send the request again")

    async def _answer_error(
        self, error: RequestError, client: ClientStream, scope: Scope, receive: Receive, send: Send
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
            async with asyncio.timeout(ERROR_TIMEOUT_S):
                if client.has_begun:
                    await client.end_answer(error_event(error))
                else:
                    await error_response(error, self._echo)(scope, receive, send)
        except (TimeoutError, ClientDisconnect):
            log.info("client does not read", request_id=self._request_id)
        return error.status_code
