"""What the gateway itself answers, as the API's description shows it."""

from typing import Literal

from pydantic import BaseModel


class ErrorFields(BaseModel):
    """What is wrong: `param` names the faulty part, `code` is stable, `message` is for people."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """Every answer that is not a success."""

    error: ErrorFields


class MessagesErrorFields(BaseModel):
    """What is wrong, as Anthropic's API has it."""

    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Every answer of the Messages API that is not a success."""

    type: Literal["error"]
    error: MessagesErrorFields


class StreamedEvent(BaseModel):
    """Each event of a stream; `event` is `message` where the stream does not name it."""

    event: str
    data: str


class ModelCard(BaseModel):
    """A model that is served, or a LoRA adapter of one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: str | None  # the model that an adapter belongs to


class ModelList(BaseModel):
    """All of them."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(BaseModel):
    """Of the gateway."""

    version: str


class FileObject(BaseModel):
    """An uploaded file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str


class FileList(BaseModel):
    """A page of a key's files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(BaseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class LiveReport(BaseModel):
    """The process runs."""

    status: Literal["live"]


class InstanceReport(BaseModel):
    """One instance, as the registry has it."""

    instance: str
    role: str
    model: str | None
    num_adapters: int
    draining: bool


class ReadyReport(BaseModel):
    """What the gateway sees."""

    status: Literal["ready", "not ready"]
    redis: bool
    draining: bool
    encoder_available: bool
    num_requests: int
    instances: list[InstanceReport]
