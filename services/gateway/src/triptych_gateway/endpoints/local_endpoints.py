"""Endpoints that the gateway answers itself, and the shapes of answers."""

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel

from triptych_gateway.endpoints.endpoint import BodyForm, Endpoint, EndpointKind, Schema
from triptych_gateway.endpoints.kinds import ANY_OBJECT, TEXT, WHOLE


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
    release: str | None


class ReadyReport(BaseModel):
    """Report of readiness, with the instances that the gateway knows."""

    status: Literal["ready", "not ready"]
    redis: bool
    draining: bool
    encoder_available: bool
    num_requests: int
    instances: list[InstanceReport]


FILES_PATH = "/v1/files"
UI_PATH = "/ui"
_JSON = "application/json"
_BYTES: Schema = {**TEXT, "format": "binary"}
_PURPOSE: Schema = {**TEXT, "enum": ["vision", "user_data"]}


def _get(path: str, tag: str, summary: str, answer: type[BaseModel] | Schema | None = None) -> Endpoint:
    return Endpoint(
        path, EndpointKind.LOCAL, tag, summary, methods=("GET",), form=BodyForm.NONE, answer=answer
    )


def _status(
    path: str, summary: str, answer: type[BaseModel] | Schema | None = None, answer_type: str = ""
) -> Endpoint:
    """Return an endpoint that operators and balancers call without a key."""
    return replace(_get(path, "status", summary, answer), answer_type=answer_type, needs_key=False)


LIST_MODELS = _get("/v1/models", "models", "The models that are served", ModelList)
GET_MODEL = replace(_get("/v1/models/{model:path}", "models", "One model", ModelCard), error_statuses=(404,))
UPLOAD_FILE = Endpoint(
    FILES_PATH,
    EndpointKind.LOCAL,
    "files",
    "Upload a file, to name it in requests",
    form=BodyForm.FORM,
    passed_fields={
        "file": _BYTES,
        "purpose": _PURPOSE,
        "expires_after[anchor]": {**TEXT, "enum": ["created_at"]},
        "expires_after[seconds]": WHOLE,
    },
    answer=FileObject,
    required=("file", "purpose"),
    error_statuses=(400, 403, 404, 408, 413, 429, 503),
    takes_media=True,
)
LIST_FILES = replace(
    _get(FILES_PATH, "files", "The key's files", FileList),
    query={
        "after": TEXT,
        "limit": {**WHOLE, "minimum": 1, "maximum": 10_000},
        "order": {**TEXT, "enum": ["asc", "desc"]},
        "purpose": _PURPOSE,
    },
    error_statuses=(400, 404, 429, 503),
)
GET_FILE = replace(
    _get(FILES_PATH + "/{file_id}", "files", "One file", FileObject), error_statuses=(404, 429, 503)
)
DELETE_FILE = replace(GET_FILE, summary="Delete a file", methods=("DELETE",), answer=DeletedFile)
FILE_CONTENT = replace(
    GET_FILE,
    path=FILES_PATH + "/{file_id}/content",
    summary="A file's bytes",
    answer=_BYTES,
    answer_type="application/octet-stream",
)
HEALTH = replace(_status("/health", "200 when requests are served, else 503; empty"), error_statuses=(503,))
PING = replace(HEALTH, path="/ping", methods=("GET", "POST"), summary="The same as /health")
LIVE = _status("/health/live", "The process runs", LiveReport, _JSON)
READY = replace(
    _status("/health/ready", "The same as /health, with what the gateway sees", ReadyReport, _JSON),
    error_statuses=(503,),
)
VERSION = _status("/version", "The gateway's version", VersionAnswer, _JSON)
METRICS = _status("/metrics", "Metrics for Prometheus", TEXT, "text/plain")
OPENAPI = _status("/openapi.json", "This description", ANY_OBJECT, _JSON)
DOCS = _status("/docs", "This description, for people", TEXT, "text/html")
UI_PAGE = replace(
    _status(UI_PATH, "A page that shows what the gateway sees, where it is enabled", TEXT, "text/html"),
    tag="page",
    error_statuses=(404,),
)
UI_FILE = replace(
    UI_PAGE, path=UI_PATH + "/{file}", summary="A file of that page", answer=_BYTES, answer_type="*/*"
)
UI_SNAPSHOT = replace(
    _get(UI_PATH + "/api/snapshot", "page", "What the page shows: instances, load, recent requests"),
    answer={**ANY_OBJECT, "required": ["system", "requests"]},
    error_statuses=(404,),
)
UI_EVENTS = replace(
    UI_SNAPSHOT,
    path=UI_PATH + "/api/events",
    summary="The same, and then what changes, as server-sent events",
    answer=StreamedEvent,
    answer_type="text/event-stream",
    error_statuses=(404, 429),
)
LOCAL = (
    *(LIST_MODELS, GET_MODEL, UPLOAD_FILE, LIST_FILES, GET_FILE, DELETE_FILE, FILE_CONTENT),
    *(HEALTH, PING, LIVE, READY, VERSION, METRICS, OPENAPI, DOCS),
    *(UI_PAGE, UI_FILE, UI_SNAPSHOT, UI_EVENTS),
)
