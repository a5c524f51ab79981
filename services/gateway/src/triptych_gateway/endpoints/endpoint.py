"""Endpoint of the gateway, as an entry of the table. Pure data."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr

_CONVERTER = re.compile(r":\w+}")  # of a path's parameter, as Starlette reads it

Schema = Mapping[str, Any]

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/responses/{response_id}": "retrieve_response",
    "/v1/responses/{response_id}/cancel": "cancel_response",
}


CacheSalt = Annotated[str, Field(strict=True, pattern=r"^[^@/\\\x00]{1,128}$")]  # as vLLM has it


class AnyBody(BaseModel):
    """Fields that all bodies share. Without a model, or with an empty name, it is the one that is served."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    stream: bool | None = None  # 1 and "true" as well, as in vLLM
    cache_salt: CacheSalt | None = None
    vllm_xargs: dict[str, Any] | None = None


class AnyChatBody(AnyBody):
    """Fields that chats of all forms share."""

    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)


class ChatBody(AnyChatBody):
    """Body of a chat completion request."""

    use_beam_search: StrictBool | None = None
    n: int | None = None


class MessagesBody(AnyChatBody):
    """Body of Anthropic's Messages API, which demands a model; vLLM checks `max_tokens`."""

    model: StrictStr = Field(min_length=1)


class TextBody(AnyBody):
    """Body of any other forwarded request."""

    n: int | None = None


class ResponseBody(AnyBody):
    """Body of a response."""

    input: Any  # text, or a list of objects
    instructions: StrictStr | None = None
    store: StrictBool | None = True
    background: StrictBool | None = None
    previous_response_id: StrictStr | None = Field(default=None, min_length=1)
    truncation: StrictStr | None = None
    max_output_tokens: int | None = None
    tools: Any = None  # a list of objects


FormBody = AnyChatBody | ResponseBody


class EndpointKind(StrEnum):
    """Kinds of requests; all but LOCAL are forwarded to a prefill_decode."""

    CHAT = "chat"  # one chat, perhaps with media: these go to encoders
    RESPONSE = "response"  # likewise, in the form of OpenAI's Responses API
    STORED = "stored"  # one response that was stored: nothing is computed
    GENERATE = "generate"  # text in, tokens out
    POOL = "pool"  # text in, numbers out; served by models that pool
    SOUND = "sound"  # a form with a sound in, text out; served by instances that encode sounds themselves
    TOKENIZE = "tokenize"  # nothing is computed
    LOCAL = "local"  # answered by the gateway itself


class ChatForm(StrEnum):
    """Forms of chats, which differ in places of media, answers and errors."""

    COMPLETIONS = "completions"  # OpenAI's chat completions; also everything that is no chat
    MESSAGES = "messages"  # Anthropic's Messages API
    RESPONSES = "responses"  # OpenAI's Responses API


class BodyForm(StrEnum):
    NONE = "none"
    JSON = "json"
    FORM = "form"  # multipart


class ServedBy(StrEnum):
    """Instances that may get a request, where some only prefill and others only decode."""

    STAGES = "stages"  # one that does all of it; or one that prefills, then one that decodes
    ALONE = "alone"  # one that does all of it; or one that decodes, which computes a text's prompt itself
    WHOLE = "whole"  # one that does all of it
    ANY = "any"  # whatever its stage is: no token is computed


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One path. Forwarded requests go to the same path of prefill_decode."""

    path: str
    kind: EndpointKind
    tag: str
    summary: str
    methods: tuple[str, ...] = ("POST",)
    body: type[BaseModel] | None = None  # the fields that the gateway reads
    passed_fields: Mapping[str, Schema] = field(default_factory=dict)  # of the body: described, and checked
    inputs: tuple[str, ...] = ()  # fields of the body that hold what the model reads
    refused_fields: tuple[str, ...] = ()  # besides those that no endpoint takes
    answer: type[BaseModel] | Schema | None = None  # None: any JSON
    answer_type: str = "application/json"  # "": the answer is empty
    form: BodyForm = BodyForm.JSON
    chat_form: ChatForm = ChatForm.COMPLETIONS
    required: tuple[str, ...] = ()  # fields of a form
    query: Mapping[str, Schema] = field(default_factory=dict)
    error_statuses: tuple[int, ...] = ()  # of a local answer, besides those that follow from the rest
    needs_key: bool = True
    streams: bool = False  # on demand, by server-sent events
    takes_media: bool = False
    served_by: ServedBy = ServedBy.WHOLE

    @property
    def is_forwarded(self) -> bool:
        return self.kind is not EndpointKind.LOCAL

    @property
    def is_computed(self) -> bool:
        """True if the model computes: a request uses the engine and leaves something in a cache."""
        return self.kind not in (EndpointKind.TOKENIZE, EndpointKind.STORED)

    @property
    def takes_stream_options(self) -> bool:
        """True if the request must ask for a stream's usage; other streams report it unasked."""
        return self.streams and self.form is BodyForm.JSON and self.chat_form is ChatForm.COMPLETIONS

    @property
    def operation(self) -> str:
        """Name of the operation by OpenTelemetry's conventions for generative AI, else by its path."""
        return _OPERATIONS.get(self.path, self.path.rpartition("/")[2])

    @property
    def shown_path(self) -> str:
        """Path as the API's description writes it: `/v1/models/{model}`."""
        return _CONVERTER.sub("}", self.path)

    @property
    def parameters(self) -> list[str]:
        return re.findall(r"{(\w+)}", self.shown_path)
