"""Fields of bodies that the gateway reads. Unknown ones are kept for vLLM, which checks all of them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr

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
