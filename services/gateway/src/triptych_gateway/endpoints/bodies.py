"""The fields of bodies that the gateway reads. Unknown ones are kept for vLLM, which checks all of them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictBool, StrictStr


class ChatBody(BaseModel):
    """A chat completion."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr = Field(min_length=1)
    messages: Annotated[list[dict[str, Any]], FailFast()] = Field(min_length=1)
    stream: StrictBool | None = None
    use_beam_search: StrictBool | None = None
    n: int | None = None
    vllm_xargs: dict[str, Any] | None = None


class TextBody(BaseModel):
    """Any other request that is forwarded. Without a model it is for the one that is served."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = Field(default=None, min_length=1)
    stream: StrictBool | None = None
    n: int | None = None
    vllm_xargs: dict[str, Any] | None = None
