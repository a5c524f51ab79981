"""Fields of bodies that the gateway reads. Unknown ones are kept for vLLM, which checks all of them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr


class AnyChatBody(BaseModel):
    """Fields that chats of all forms share."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = Field(min_length=1)
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    stream: StrictBool | None = None
    vllm_xargs: dict[str, Any] | None = None


class ChatBody(AnyChatBody):
    """Body of a chat completion request."""

    use_beam_search: StrictBool | None = None
    n: int | None = None


class MessagesBody(AnyChatBody):
    """Body of Anthropic's Messages API; vLLM checks `max_tokens`."""


class TextBody(BaseModel):
    """Body of any other forwarded request, without a model for the one that is served."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = Field(default=None, min_length=1)
    stream: StrictBool | None = None
    n: int | None = None
    vllm_xargs: dict[str, Any] | None = None


class ResponseBody(BaseModel):
    """Body of a response, without a model for the one that is served."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = Field(default=None, min_length=1)
    input: Any  # text, or a list of objects
    instructions: StrictStr | None = None
    stream: StrictBool | None = None
    store: StrictBool | None = True
    background: StrictBool | None = None
    previous_response_id: StrictStr | None = Field(default=None, min_length=1)
    truncation: StrictStr | None = None
    max_output_tokens: int | None = None
    tools: Any = None  # a list of objects
    vllm_xargs: dict[str, Any] | None = None


FormBody = AnyChatBody | ResponseBody
