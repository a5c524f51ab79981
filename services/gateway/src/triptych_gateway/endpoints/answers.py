"""Answers of the gateway itself, as the API's description shows them."""

from typing import Literal

from pydantic import BaseModel


class ErrorFields(BaseModel):
    """Error object: `param` names the faulty part, `code` is stable, `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Answer that is not a success."""

    error: ErrorFields


class MessagesErrorFields(BaseModel):
    """Error object in the format of Anthropic's API."""

    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Answer of the Messages API that is not a success."""

    type: Literal["error"]
    error: MessagesErrorFields


class StreamedEvent(BaseModel):
    """Event of a stream; `event` is `message` where the stream does not name it."""

    event: str
    data: str


class ModelCard(BaseModel):
    """Model that is served, or a LoRA adapter of one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None  # the model that an adapter belongs to


class ModelList(BaseModel):
    """List of the models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(BaseModel):
    """Version of the gateway's package."""

    version: str


class FileObject(BaseModel):
    """Uploaded file in OpenAI's format."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class FileList(BaseModel):
    """Page of an API key's uploaded files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """Answer to the deletion of a file."""

    id: str
    object: Literal["file"]
    deleted: bool


class LiveReport(BaseModel):
    """Report that the process runs."""

    status: Literal["live"]


class InstanceReport(BaseModel):
    """Registry's record of one instance."""

    instance: str
    role: str
    model: str | None
    num_adapters: int
    draining: bool


class ReadyReport(BaseModel):
    """Report of readiness, with the instances that the gateway knows."""

    status: Literal["ready", "not ready"]
    redis: bool
    draining: bool
    encoder_available: bool
    num_requests: int
    instances: list[InstanceReport]
