"""Responses over HTTP: made, or read and cancelled where they are stored.

A stored response is recorded before the first byte of its answer is sent, so that a client with its id finds
it.
"""

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Self
from urllib.parse import parse_qs, urlencode

from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from triptych_common.bus import AsyncBus
from triptych_common.coordination import StoredResponses
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.chat.dispatch import Arrival, Dispatch, PriorResponse
from triptych_gateway.chat.exchange import ChatParts, Exchange
from triptych_gateway.chat.routing import chat_routing
from triptych_gateway.chat.streaming import ClientStream
from triptych_gateway.chat.upstream import RESPONSE_PARAM
from triptych_gateway.chat.upstream_body import text_body
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.files.file_service import FileService
from triptych_gateway.race import Guard
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.responses.continuation import continue_from, record_of
from triptych_gateway.responses.kept_images import KeptImages
from triptych_gateway.responses.response_index import FoundResponse, ResponseIndex, new_response_id
from triptych_gateway.responses.response_request import ResponseRequest
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import SERVING_ROLES
from triptych_gateway.settings import GatewaySettings

MAX_EVENTS = 10**9  # of one response
_FLAG = TypeAdapter(bool)  # as vLLM reads it


@dataclass(frozen=True, slots=True)
class ResponseParts:
    """Parts that exchanges of responses share beside `ChatParts`."""

    index: ResponseIndex
    images: KeptImages

    @classmethod
    def open(
        cls,
        settings: GatewaySettings,
        bus: AsyncBus,
        view: RegistryView,
        files: FileService | None,
        file_threads: Executor,
    ) -> Self:
        stored = StoredResponses(bus, settings.responses_ttl_s)
        images = KeptImages(settings.responses_image_bytes, files, file_threads)
        return cls(ResponseIndex(stored, view), images)


class ResponseExchange(Exchange[ResponseRequest]):
    """Exchange that makes a response, perhaps from an earlier one."""

    def __init__(
        self,
        endpoint: Endpoint,
        parts: ChatParts,
        responses: ResponseParts,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(endpoint, parts, scope, receive, send)
        self._responses = responses
        self._found: FoundResponse | None = None

    async def _read(self, booking: Booking, guard: Guard) -> ResponseRequest:
        responses = self._responses
        body = await self._read_body(booking, guard)
        chat = await self._parts.parser.parse(body, booking.resize, self._endpoint)
        chat = chat.with_model(self._resolve(chat.model))
        request = ResponseRequest.of_chat(chat, new_response_id())
        if request.previous_response_id is not None:
            self._found = await responses.index.find(request.previous_response_id, self._caller)
            request = await continue_from(
                request, self._found, responses.images, self._caller, self._parts.parser.max_items
            )
        has_raw = self._found is not None and self._found.record.has_raw_media
        request.check_beside_media(has_earlier_media=has_raw)
        limits = self._caller.limits
        if request.is_background and limits is not None and limits.tokens_per_minute is not None:
            self._check_background(request)
        return request

    def _check_background(self, request: ResponseRequest) -> None:
        """Require a bound on a background response, whose usage is unknown while its caller is connected."""
        if not isinstance(request.body.get("max_output_tokens"), int):
            message = "max_output_tokens must be set for background: this API key has a limit of tokens"
            raise RequestError(400, "missing_field", message, "max_output_tokens")

    def _with_model(self, request: ResponseRequest) -> ResponseRequest:
        model = request.model or self._parts.instances.only_model(self._caller.may_use)
        return replace(request, model=model)

    async def _serve(
        self, request: ResponseRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        parts, found = self._parts, self._found
        await self._wait_model(request.model, arrival)
        prior = None if found is None else PriorResponse(found.instance, found.record.has_raw_media)
        arrival = replace(arrival, prior=prior, on_answer=partial(self._keep, request))
        if request.media:
            await parts.media_serving.serve(request, arrival, booking, client)
        else:
            routing = chat_routing(request, arrival.session)
            dispatch = Dispatch(
                arrival, request, text_body(request), endpoint=self._endpoint, routing=routing
            )
            await parts.forwarder.forward(dispatch, client)

    async def _keep(self, request: ResponseRequest, dispatch: Dispatch, instance: InstanceRecord) -> None:
        if not request.stores or not instance.stores_responses:
            return
        if request.media and instance.role not in SERVING_ROLES:
            return  # it has no items: it could not go on from this one
        items = tuple(dispatch.media_wait.items) if dispatch.media_wait is not None else ()
        for item in items:
            if isinstance(item.content, bytes):
                self._responses.images.keep(item.media_digest, item.content)
        record = record_of(
            request,
            items,
            self._found,
            instance=instance.instance,
            boot_id=instance.boot_id,
            owner=self._caller.owner,
            is_raw=dispatch.needs_tower,
        )
        await self._responses.index.keep(request.response_id, record)


class StoredExchange(Exchange[TextRequest]):
    """Exchange that reads a stored response or its events, or cancels it. Limits of keys do not count."""

    def __init__(
        self,
        endpoint: Endpoint,
        parts: ChatParts,
        responses: ResponseParts,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(endpoint, parts, scope, receive, send)
        self._responses = responses
        self._found: FoundResponse | None = None
        self._query = ""

    async def _read(self, booking: Booking, guard: Guard) -> TextRequest:
        await self._read_body(booking, guard)  # nothing in it counts
        response_id = self._scope["path_params"][RESPONSE_PARAM]
        is_stream, self._query = _stream_query(self._scope) if self._endpoint.streams else (False, "")
        self._found = await self._responses.index.find(response_id, self._caller)
        record = self._found.record
        if is_stream and not record.has_events:  # vLLM finds that once its answer has begun
            message = f"Unknown response_id: {response_id}"
            raise RequestError(400, "invalid_value", message, RESPONSE_PARAM)
        return TextRequest(
            body={},
            model=record.model,
            stream=is_stream,
            inputs=(),
            is_computed=False,
            num_prompt_bytes=0,
            checked_tokens=frozenset(),
        )

    def _with_model(self, request: TextRequest) -> TextRequest:
        return request

    async def _serve_counted(
        self, request: TextRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        await self._serve(request, arrival, booking, client)

    async def _serve(
        self, request: TextRequest, arrival: Arrival, booking: Booking, client: ClientStream
    ) -> None:
        if self._found is None:
            raise RuntimeError("a request is parsed before it is served")
        arrival.root.on_model(request.model)
        arrival = replace(arrival, prior=PriorResponse(self._found.instance, has_raw_media=False))
        path = self._scope["path"] + self._query
        dispatch = Dispatch(arrival, request, b"", endpoint=self._endpoint, path=path)
        await self._parts.forwarder.forward(dispatch, client)


def _stream_query(scope: Scope) -> tuple[bool, str]:
    """Return whether a stream is requested, and the query for prefill_decode.

    Raises:
        RequestError: 400.
    """
    asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    try:
        is_stream = _FLAG.validate_python(asked.get("stream", ["false"])[-1])
    except ValidationError as error:
        raise RequestError(400, "invalid_value", "stream must be true or false", "stream") from error
    if not is_stream:
        return False, ""
    query = {"stream": "true"}
    after = asked.get("starting_after", [""])[-1]
    if after:
        if not after.isascii() or not after.isdigit() or int(after[:20]) > MAX_EVENTS:
            message = "starting_after must be the number of an event"
            raise RequestError(400, "invalid_value", message, "starting_after")
        query["starting_after"] = after
    return True, "?" + urlencode(query)
