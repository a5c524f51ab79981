"""The fields of bodies that the gateway reads. Unknown ones are kept for vLLM, which checks all of them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr


class AnyChatBody(BaseModel):
    """A chat in any form."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = Field(min_length=1)
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    stream: StrictBool | None = None
    vllm_xargs: dict[str, Any] | None = None


class ChatBody(AnyChatBody):
    """A chat completion."""

    use_beam_search: StrictBool | None = None
    n: int | None = None


class MessagesBody(AnyChatBody):
    """A request of Anthropic's Messages API. `max_tokens` is vLLM's to check."""


class TextBody(BaseModel):
    """Any other request that is forwarded. Without a model it is for the one that is served."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = Field(default=None, min_length=1)
    stream: StrictBool | None = None
    n: int | None = None
    vllm_xargs: dict[str, Any] | None = None


class ResponseBody(BaseModel):
    """A response. Without a model it is for the one that is served."""

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
