"""Record of a stored response in Redis, as JSON: its instance, owner and images. Pure.

The record has no texts: they are in the instance alone.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, StringConstraints

from triptych_common.protocol.messages import ImageProperties

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class ResponseImage(BaseModel):
    """Image of the conversation up to a response, without its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    media_digest: Digest
    num_bytes: PositiveInt
    image: ImageProperties
    file_id: str | None = None  # of an uploaded file


class ResponseRecord(BaseModel):
    """Record of one stored response."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    instance: str
    boot_id: str  # another life of the instance has forgotten it
    owner: str  # `Caller.owner`
    model: str
    has_events: bool = False  # made in the background as a stream: its events can be read again
    has_raw_media: bool = False  # the instance encodes its images itself, and has them
    images: tuple[ResponseImage, ...] = ()  # that encoders make, in the order of the prompt
    processor_options: Mapping[str, Any] = Field(default_factory=dict)  # of these images
    media_io_options: Mapping[str, Any] = Field(default_factory=dict)
