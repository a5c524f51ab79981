"""All endpoints of the gateway. One that is forwarded needs an entry here, and nothing else."""

from dataclasses import replace

from pydantic import BaseModel

from triptych_gateway.endpoints import fields
from triptych_gateway.endpoints.answers import (
    DeletedFile,
    FileList,
    FileObject,
    LiveReport,
    ModelCard,
    ModelList,
    ReadyReport,
    VersionAnswer,
)
from triptych_gateway.endpoints.bodies import ChatBody, MessagesBody, ResponseBody, TextBody
from triptych_gateway.endpoints.endpoint import BodyForm, ChatForm, Endpoint, EndpointKind, Schema

FILES_PATH = "/v1/files"
RESPONSES_PATH = "/v1/responses"
TOKENIZE_PATH = "/tokenize"
UI_PATH = "/ui"

_JSON = "application/json"
_TEXT: Schema = {"type": "string"}
_BYTES: Schema = {"type": "string", "format": "binary"}
_SCORED = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "instruction")
_RANKED = ("query", "documents", "instruction")

# ---- forwarded ---------------------------------------------------------------------------------------
CHAT = Endpoint(
    "/v1/chat/completions",
    EndpointKind.CHAT,
    "generation",
    "A chat completion; media go to encoders",
    body=ChatBody,
    passed_fields=fields.CHAT,
    inputs=("messages",),
    answer=fields.GENERATED,
    streams=True,
    takes_media=True,
)
MESSAGES = Endpoint(
    "/v1/messages",
    EndpointKind.CHAT,
    "generation",
    "A chat in the form of Anthropic's Messages API; images go to encoders",
    body=MessagesBody,
    passed_fields=fields.MESSAGES_API,
    inputs=("messages", "system"),
    refused_fields=("mm_processor_kwargs", "media_io_kwargs"),  # which vLLM does not know there
    answer=fields.MESSAGE,
    chat_form=ChatForm.MESSAGES,
    streams=True,
    takes_media=True,
)
COUNT_TOKENS = replace(
    MESSAGES,
    path="/v1/messages/count_tokens",
    kind=EndpointKind.TOKENIZE,
    summary="How many tokens such a chat has",
    passed_fields=fields.COUNTED_MESSAGES,
    answer=fields.NUM_TOKENS,
    streams=False,
)

CREATE_RESPONSE = Endpoint(
    RESPONSES_PATH,
    EndpointKind.RESPONSE,
    "responses",
    "A response; images go to encoders",
    body=ResponseBody,
    passed_fields=fields.RESPONSE,
    inputs=("input", "instructions"),
    refused_fields=("previous_input_messages",),  # of the one format that the gateway does not read
    answer=fields.ANSWERED,
    streams=True,
    takes_media=True,
    chat_form=ChatForm.RESPONSES,
)
GET_RESPONSE = Endpoint(
    RESPONSES_PATH + "/{response_id}",
    EndpointKind.STORED,
    "responses",
    "A stored response",
    methods=("GET",),
    form=BodyForm.NONE,
    query={
        "stream": {"type": "boolean"},
        "starting_after": {"type": "integer", "description": "with `stream`: after this event"},
    },
    answer=fields.ANSWERED,
    streams=True,
    chat_form=ChatForm.RESPONSES,
)
CANCEL_RESPONSE = Endpoint(
    RESPONSES_PATH + "/{response_id}/cancel",
    EndpointKind.STORED,
    "responses",
    "Cancel a response that runs in the background",
    form=BodyForm.NONE,
    answer=fields.ANSWERED,
)

FORWARDED = (
    CHAT,
    MESSAGES,
    COUNT_TOKENS,
    Endpoint(
        "/v1/chat/completions/batch",
        EndpointKind.GENERATE,
        "generation",
        "Several chats at once; a choice for each",
        body=TextBody,
        passed_fields=fields.CHAT_BATCH,
        inputs=("messages",),
        answer=fields.GENERATED,
    ),
    Endpoint(
        "/v1/completions",
        EndpointKind.GENERATE,
        "generation",
        "Completions of a text, of token ids, or of a list of either",
        body=TextBody,
        passed_fields=fields.COMPLETION,
        inputs=("prompt",),
        refused_fields=("prompt_embeds",),
        answer=fields.GENERATED,
        streams=True,
    ),
    Endpoint(
        "/v1/embeddings",
        EndpointKind.POOL,
        "pooling",
        "Embeddings of texts",
        body=TextBody,
        passed_fields=fields.POOLING,
        inputs=("input", "messages"),
        answer=fields.POOLED,
    ),
    Endpoint(
        "/pooling",
        EndpointKind.POOL,
        "pooling",
        "A pooling model's output for texts",
        body=TextBody,
        passed_fields=fields.POOLING,
        inputs=("input", "messages"),
        refused_fields=("data",),  # for plugins, which fetch what it names
        answer=fields.POOLED,
    ),
    Endpoint(
        "/classify",
        EndpointKind.POOL,
        "pooling",
        "Classes of texts",
        body=TextBody,
        passed_fields=fields.CLASSIFY,
        inputs=("input", "messages"),
        answer=fields.POOLED,
    ),
    *(
        Endpoint(
            path,
            EndpointKind.POOL,
            "pooling",
            "How well texts belong together",
            body=TextBody,
            passed_fields=fields.SCORE,
            inputs=_SCORED,
            answer=fields.POOLED,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(
            path,
            EndpointKind.POOL,
            "pooling",
            "Documents in the order in which they answer a query",
            body=TextBody,
            passed_fields=fields.RERANK,
            inputs=_RANKED,
            answer=fields.RANKED,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    *(
        Endpoint(
            path,
            EndpointKind.SOUND,
            "audio",
            summary,
            form=BodyForm.FORM,
            passed_fields=fields.SOUND,
            required=("file",),
            inputs=("prompt",),
            answer=fields.WRITTEN,
            streams=True,
            takes_media=True,
        )
        for path, summary in (
            ("/v1/audio/transcriptions", "The text of a sound"),
            ("/v1/audio/translations", "The text of a sound, in another language"),
        )
    ),
    Endpoint(
        TOKENIZE_PATH,
        EndpointKind.TOKENIZE,
        "tokens",
        "Token ids of a text, or of a chat as the model's template writes it",
        body=TextBody,
        passed_fields=fields.TOKENIZE,
        inputs=("prompt", "messages"),
        answer=fields.TOKENS,
    ),
    Endpoint(
        "/detokenize",
        EndpointKind.TOKENIZE,
        "tokens",
        "The text of token ids",
        body=TextBody,
        passed_fields=fields.DETOKENIZE,
        inputs=("tokens",),
        answer=fields.TEXT_OF_TOKENS,
    ),
    CREATE_RESPONSE,
    GET_RESPONSE,
    CANCEL_RESPONSE,
)

# ---- answered by the gateway -------------------------------------------------------------------------
LIST_MODELS = Endpoint(
    "/v1/models",
    EndpointKind.LOCAL,
    "models",
    "The models that are served",
    methods=("GET",),
    form=BodyForm.NONE,
    answer=ModelList,
)
GET_MODEL = Endpoint(
    "/v1/models/{model:path}",
    EndpointKind.LOCAL,
    "models",
    "One model",
    methods=("GET",),
    form=BodyForm.NONE,
    answer=ModelCard,
    error_statuses=(404,),
)
UPLOAD_FILE = Endpoint(
    FILES_PATH,
    EndpointKind.LOCAL,
    "files",
    "Upload a file, to name it in requests",
    form=BodyForm.FORM,
    passed_fields={
        "file": _BYTES,
        "purpose": {"type": "string", "enum": ["vision", "user_data"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
    answer=FileObject,
    required=("file", "purpose"),
    error_statuses=(400, 403, 404, 408, 413, 429, 503),
    takes_media=True,
)
LIST_FILES = Endpoint(
    FILES_PATH,
    EndpointKind.LOCAL,
    "files",
    "The key's files",
    methods=("GET",),
    form=BodyForm.NONE,
    query={
        "after": _TEXT,
        "limit": {"type": "integer", "minimum": 1, "maximum": 10_000},
        "order": {"type": "string", "enum": ["asc", "desc"]},
        "purpose": {"type": "string", "enum": ["vision", "user_data"]},
    },
    answer=FileList,
    error_statuses=(400, 404, 429, 503),
)
GET_FILE = Endpoint(
    FILES_PATH + "/{file_id}",
    EndpointKind.LOCAL,
    "files",
    "One file",
    methods=("GET",),
    form=BodyForm.NONE,
    answer=FileObject,
    error_statuses=(404, 429, 503),
)
DELETE_FILE = Endpoint(
    FILES_PATH + "/{file_id}",
    EndpointKind.LOCAL,
    "files",
    "Delete a file",
    methods=("DELETE",),
    form=BodyForm.NONE,
    answer=DeletedFile,
    error_statuses=(404, 429, 503),
)
FILE_CONTENT = Endpoint(
    FILES_PATH + "/{file_id}/content",
    EndpointKind.LOCAL,
    "files",
    "A file's bytes",
    methods=("GET",),
    form=BodyForm.NONE,
    answer=_BYTES,
    answer_type="application/octet-stream",
    error_statuses=(404, 429, 503),
)


def _status(
    path: str, summary: str, answer: type[BaseModel] | Schema | None = None, answer_type: str = ""
) -> Endpoint:
    """What operators and balancers ask for, without a key."""
    return Endpoint(
        path,
        EndpointKind.LOCAL,
        "status",
        summary,
        methods=("GET",),
        form=BodyForm.NONE,
        answer=answer,
        answer_type=answer_type,
        needs_key=False,
    )


HEALTH = replace(_status("/health", "200 when requests are served, else 503; empty"), error_statuses=(503,))
PING = replace(HEALTH, path="/ping", methods=("GET", "POST"), summary="The same as /health")
LIVE = _status("/health/live", "The process runs", LiveReport, _JSON)
READY = replace(
    _status("/health/ready", "The same as /health, with what the gateway sees", ReadyReport, _JSON),
    error_statuses=(503,),
)
VERSION = _status("/version", "The gateway's version", VersionAnswer, _JSON)
METRICS = _status("/metrics", "Metrics for Prometheus", _TEXT, "text/plain")
OPENAPI = _status("/openapi.json", "This description", {"type": "object"}, _JSON)
DOCS = _status("/docs", "This description, for people", _TEXT, "text/html")
UI_PAGE = replace(
    _status(UI_PATH, "A page that shows what the gateway sees, where it is enabled", _TEXT, "text/html"),
    tag="page",
    error_statuses=(404,),
)
UI_FILE = replace(
    UI_PAGE, path=UI_PATH + "/{file}", summary="A file of that page", answer=_BYTES, answer_type="*/*"
)
UI_SNAPSHOT = Endpoint(
    UI_PATH + "/api/snapshot",
    EndpointKind.LOCAL,
    "page",
    "What the page shows: instances, load, recent requests",
    methods=("GET",),
    form=BodyForm.NONE,
    answer={"type": "object", "required": ["system", "requests"]},
    error_statuses=(404,),
)
UI_EVENTS = replace(
    UI_SNAPSHOT,
    path=UI_PATH + "/api/events",
    summary="The same, and then what changes, as server-sent events",
    answer=_TEXT,
    answer_type="text/event-stream",
    error_statuses=(404, 429),
)

ENDPOINTS = (
    *FORWARDED,
    LIST_MODELS,
    GET_MODEL,
    UPLOAD_FILE,
    LIST_FILES,
    GET_FILE,
    DELETE_FILE,
    FILE_CONTENT,
    HEALTH,
    PING,
    LIVE,
    READY,
    VERSION,
    METRICS,
    OPENAPI,
    DOCS,
    UI_PAGE,
    UI_FILE,
    UI_SNAPSHOT,
    UI_EVENTS,
)

_MESSAGES_PATHS = frozenset(
    endpoint.path for endpoint in ENDPOINTS if endpoint.chat_form is ChatForm.MESSAGES
)
_FORWARDED_PATHS = frozenset(endpoint.path for endpoint in FORWARDED)


def serves_callers(path: str) -> bool:
    """Whether requests for `path` are what a gateway that goes away must still finish."""
    return path.startswith("/v1/") or path in _FORWARDED_PATHS


def chat_form_of(path: str) -> ChatForm:
    """In whose form errors of a request for `path` are."""
    return ChatForm.MESSAGES if path in _MESSAGES_PATHS else ChatForm.COMPLETIONS
