"""Responses over HTTP: made, or read and cancelled where they are stored.

A stored response is recorded before the first byte of its answer is sent, so that a client with its id finds
it.
"""

from concurrent.futures import Executor
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Self
from urllib.parse import parse_qs, urlencode

from starlette.types import Receive, Scope, Send

from triptych_common.bus import AsyncBus
from triptych_common.coordination import StoredResponses
from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.access.auth import Caller
from triptych_gateway.access.request_limiter import Booking
from triptych_gateway.endpoints.endpoint import Endpoint
from triptych_gateway.files.file_record import is_file_id
from triptych_gateway.files.file_service import FileService
from triptych_gateway.proxy.context import PriorResponse, RequestContext, UpstreamRequest
from triptych_gateway.proxy.exchange import Exchange, Request
from triptych_gateway.proxy.services import Services
from triptych_gateway.proxy.streaming import ClientStream
from triptych_gateway.proxy.upstream import RESPONSE_PARAM
from triptych_gateway.race import Guard
from triptych_gateway.request.chat_request import MEDIA_IO_FIELD, PROCESSOR_FIELD, ChatRequest, read_flag
from triptych_gateway.request.content_parts import MediaPart, Place, format_place, value_at
from triptych_gateway.request.forms.responses import check_beside_media
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.responses.response_index import (
    PREVIOUS_FIELD,
    FoundResponse,
    KeptImages,
    ResponseImage,
    ResponseIndex,
    ResponseRecord,
    new_response_id,
    response_not_found,
)
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import SERVING_ROLES
from triptych_gateway.settings import GatewaySettings

# Tools that callers run. Others would be run by prefill_decode, which would open connections for them.
CALLERS_TOOLS = ("function", "custom", "namespace")


@dataclass(frozen=True)
class ResponseRequest(ChatRequest):
    """Valid request. Images of the response that it continues come before its own, without a place."""

    response_id: str = ""  # id of the response that it makes

    @classmethod
    def of_chat(cls, chat: ChatRequest, response_id: str) -> "ResponseRequest":
        """Make the request from a chat. Raises RequestError: 400, a tool that callers do not run."""
        _check_tools(chat.body.get("tools"), ("tools",))
        values = {each.name: getattr(chat, each.name) for each in fields(chat)}
        values["body"] = {**chat.body, "request_id": response_id}
        return cls(**values, response_id=response_id)

    @property
    def stores(self) -> bool:
        """True if the response may be stored."""
        return bool(self.body.get("store", True))

    @property
    def is_background(self) -> bool:
        return bool(self.body.get("background"))

    @property
    def previous_response_id(self) -> str | None:
        previous: str | None = self.body.get("previous_response_id")
        return previous

    def is_kept(self, part: MediaPart) -> bool:
        """Return whether a continuation has the item too: vLLM leaves system messages out."""
        return not part.place or value_at(self.body, part.place[:2]).get("role") != "system"

    def check_beside_media(self, *, has_earlier_media: bool = False) -> None:
        """Refuse fields that cannot be combined with media, also with those from before.

        Raises:
            RequestError: 400.
        """
        if self.media or has_earlier_media:
            check_beside_media(self.body)


def _check_tools(tools: Any, place: Place) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):  # else vLLM refuses them
        tool_place = (*place, index)
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind not in CALLERS_TOOLS:
            path = format_place((*tool_place, "type"))
            message = (
                f"{path}: tools of type {str(kind)[:50]!r} are not served; functions that callers run are"
            )
            raise RequestError(400, "unsupported_tool", message, path)
        if kind == "namespace":
            _check_tools(tool.get("tools"), (*tool_place, "tools"))


async def continue_from(
    request: ResponseRequest, found: FoundResponse, images: KeptImages, caller: Caller, max_items: int
) -> ResponseRequest:
    """Return `request` with the images of the conversation before its own; they have no place in its body.

    Raises:
        RequestError: 404, the response is of another model; 400, other options than before, too many images.
    """
    record, response_id = found.record, request.previous_response_id or ""
    if request.model not in ("", record.model):
        raise response_not_found(response_id)
    if record.has_raw_media and (request.processor_options or request.media_io_options):
        raise _other_options(PROCESSOR_FIELD if request.processor_options else MEDIA_IO_FIELD)
    if record.images and request.processor_options != record.processor_options:
        raise _other_options(PROCESSOR_FIELD)
    if record.images and request.media_io_options.get(Modality.IMAGE, {}) != record.media_io_options:
        raise _other_options(MEDIA_IO_FIELD)
    earlier = [
        MediaPart(
            index, (), Modality.IMAGE, "", PREVIOUS_FIELD, file=await images.find(image, caller, response_id)
        )
        for index, image in enumerate(record.images)
    ]
    own = [replace(part, item_index=part.item_index + len(earlier)) for part in request.media]
    if len(earlier) + len(own) > max_items:
        message = f"a request may hold {max_items} media items at most, with those of the earlier responses"
        raise RequestError(400, "too_many_items", message, PREVIOUS_FIELD)
    body = {**request.body, "model": record.model}  # without it vLLM would take an adapter's base model
    return replace(request, body=body, model=record.model, media=(*earlier, *own))


def record_of(
    request: ResponseRequest,
    items: tuple[TakenItem, ...],
    found: FoundResponse | None,
    *,
    instance: str,
    boot_id: str,
    owner: str,
    is_raw: bool,
) -> ResponseRecord:
    """Return the record of a response when its answer begins; `is_raw` means that its media were sent raw."""
    has_raw_media = is_raw or (found is not None and found.record.has_raw_media)
    kept = [] if is_raw else [item for item in items if request.is_kept(item.part)]
    return ResponseRecord(
        instance=instance,
        boot_id=boot_id,
        owner=owner,
        model=request.model,
        has_events=request.is_background and request.stream,
        has_raw_media=has_raw_media,
        images=tuple(_image_of(item) for item in kept),
        processor_options=request.processor_options if kept else {},
        media_io_options=request.media_io_options.get(Modality.IMAGE, {}) if kept else {},
    )


def _image_of(item: TakenItem) -> ResponseImage:
    if item.image is None:
        raise ValueError("a response has images alone")
    return ResponseImage(
        media_digest=item.media_digest,
        num_bytes=item.num_bytes,
        image=item.image.properties,
        file_id=_file_id(item),
    )


def _file_id(item: TakenItem) -> str | None:
    """Return the id of an uploaded file; images of an earlier response look like files too."""
    file = item.part.file
    return file.file_id if file is not None and is_file_id(file.file_id) else None


def _other_options(name: str) -> RequestError:
    message = f"{name} must be those of the response that the request continues"
    return RequestError(400, "unsupported", message, name)


MAX_EVENTS = 10**9  # of one response


@dataclass(frozen=True, slots=True)
class ResponseParts:
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


class _FoundExchange(Exchange[Request]):
    def __init__(
        self,
        endpoint: Endpoint,
        services: Services,
        responses: ResponseParts,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        super().__init__(endpoint, services, scope, receive, send)
        self._responses = responses
        self._found: FoundResponse | None = None
        self._query = ""


class ResponseExchange(_FoundExchange[ResponseRequest]):
    async def _read(self, booking: Booking, guard: Guard) -> ResponseRequest:
        responses = self._responses
        body = await self._read_body(booking, guard)
        chat = await self._services.parser.parse(body, booking.resize, self._endpoint)
        chat = chat.with_model(self._resolve(chat.model))
        request = ResponseRequest.of_chat(chat, new_response_id())
        if request.previous_response_id is not None:
            self._found = await responses.index.find(request.previous_response_id, self._caller)
            request = await continue_from(
                request, self._found, responses.images, self._caller, self._services.parser.limits.max_items
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

    async def _serve(
        self, request: ResponseRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        found = self._found
        await self._wait_model(request.model, context)
        prior = None if found is None else PriorResponse(found.instance, found.record.has_raw_media)
        context = replace(context, prior=prior, on_answer=partial(self._keep, request))
        await self._serve_chat(request, context, booking, client)

    async def _keep(
        self, request: ResponseRequest, upstream: UpstreamRequest, instance: InstanceRecord
    ) -> None:
        if not request.stores or not instance.stores_responses:
            return
        if request.media and instance.role not in SERVING_ROLES:
            return  # it has no items: it could not go on from this one
        items = tuple(upstream.item_wait.items) if upstream.item_wait is not None else ()
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
            is_raw=upstream.needs_tower,
        )
        await self._responses.index.keep(request.response_id, record)


class StoredExchange(_FoundExchange[TextRequest]):
    """Exchange that reads a stored response or its events, or cancels it. Limits of keys do not count."""

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
            endpoint=self._endpoint,
            num_prompt_bytes=0,
            checked_tokens=frozenset(),
        )

    async def _serve_counted(
        self, request: TextRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        await self._serve(request, context, booking, client)

    async def _serve(
        self, request: TextRequest, context: RequestContext, booking: Booking, client: ClientStream
    ) -> None:
        if self._found is None:
            raise RuntimeError("a request is parsed before it is served")
        context.root.on_model(request.model)
        context = replace(context, prior=PriorResponse(self._found.instance, has_raw_media=False))
        path = self._scope["path"] + self._query
        upstream = UpstreamRequest(context, request, b"", endpoint=self._endpoint, path=path)
        await self._services.forwarder.forward(upstream, client)


def _stream_query(scope: Scope) -> tuple[bool, str]:
    """Return whether a stream is requested, and the query for prefill_decode. Raises RequestError: 400."""
    asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if not read_flag(asked.get("stream", ["false"])[-1], "stream"):
        return False, ""
    query = {"stream": "true"}
    after = asked.get("starting_after", [""])[-1]
    if after:
        if not after.isascii() or not after.isdigit() or int(after[:20]) > MAX_EVENTS:
            message = "starting_after must be the number of an event"
            raise RequestError(400, "invalid_value", message, "starting_after")
        query["starting_after"] = after
    return True, "?" + urlencode(query)
