"""Table of all endpoints.

A forwarded endpoint needs an entry here and nothing else. One that the gateway answers itself is described in
`local_endpoints`, listed here, and served by a module of `routes/`.
"""

from dataclasses import replace

from triptych_gateway.endpoints import fields, response_fields
from triptych_gateway.endpoints.bodies import ChatBody, MessagesBody, ResponseBody, TextBody
from triptych_gateway.endpoints.endpoint import BodyForm, ChatForm, Endpoint, EndpointKind, ServedBy
from triptych_gateway.endpoints.local_endpoints import (
    DELETE_FILE,
    DOCS,
    FILE_CONTENT,
    GET_FILE,
    GET_MODEL,
    HEALTH,
    LIST_FILES,
    LIST_MODELS,
    LIVE,
    METRICS,
    OPENAPI,
    PING,
    READY,
    UI_EVENTS,
    UI_FILE,
    UI_PAGE,
    UI_SNAPSHOT,
    UPLOAD_FILE,
    VERSION,
)

RESPONSES_PATH = "/v1/responses"
TOKENIZE_PATH = "/tokenize"

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
    served_by=ServedBy.STAGES,
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
    served_by=ServedBy.STAGES,
)
COUNT_TOKENS = replace(
    MESSAGES,
    path="/v1/messages/count_tokens",
    kind=EndpointKind.TOKENIZE,
    summary="How many tokens such a chat has",
    passed_fields=fields.COUNTED_MESSAGES,
    answer=fields.NUM_TOKENS,
    streams=False,
    served_by=ServedBy.ANY,
)

CREATE_RESPONSE = Endpoint(
    RESPONSES_PATH,
    EndpointKind.RESPONSE,
    "responses",
    "A response; images go to encoders",
    body=ResponseBody,
    passed_fields=response_fields.RESPONSE,
    inputs=("input", "instructions"),
    refused_fields=("previous_input_messages",),  # of the one format that the gateway does not read
    answer=fields.ANSWERED,
    streams=True,
    takes_media=True,
    chat_form=ChatForm.RESPONSES,
    served_by=ServedBy.STAGES,
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
    served_by=ServedBy.ANY,
)
CANCEL_RESPONSE = Endpoint(
    RESPONSES_PATH + "/{response_id}/cancel",
    EndpointKind.STORED,
    "responses",
    "Cancel a response that runs in the background",
    form=BodyForm.NONE,
    answer=fields.ANSWERED,
    served_by=ServedBy.ANY,
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
        served_by=ServedBy.ALONE,
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
        served_by=ServedBy.STAGES,
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
        served_by=ServedBy.ANY,
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
        served_by=ServedBy.ANY,
    ),
    CREATE_RESPONSE,
    GET_RESPONSE,
    CANCEL_RESPONSE,
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
    """Return whether a draining gateway must finish requests for `path`."""
    return path.startswith("/v1/") or path in _FORWARDED_PATHS


def chat_form_of(path: str) -> ChatForm:
    """Return the form of errors for a request for `path`."""
    return ChatForm.MESSAGES if path in _MESSAGES_PATHS else ChatForm.COMPLETIONS
