"""Table of all endpoints.

A forwarded endpoint needs an entry here and nothing else. One that the gateway answers itself is listed in
`local_endpoints`, and served by a module of `routes/`.
"""

from dataclasses import replace

from triptych_gateway.endpoints import fields, response_fields
from triptych_gateway.endpoints.endpoint import (
    BodyForm,
    ChatBody,
    ChatForm,
    Endpoint,
    EndpointKind,
    MessagesBody,
    ResponseBody,
    ServedBy,
    TextBody,
)
from triptych_gateway.endpoints.local_endpoints import LOCAL

RESPONSES_PATH = "/v1/responses"
TOKENIZE_PATH = "/tokenize"

_SCORED = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2", "instruction")

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

_OF_TEXT = Endpoint("", EndpointKind.POOL, "pooling", "", body=TextBody, answer=fields.POOLED)
_OF_TEXTS = replace(_OF_TEXT, passed_fields=fields.CLASSIFY, inputs=("input", "messages"))
_POOLING = replace(_OF_TEXTS, passed_fields=fields.POOLING)
_SCORE = replace(
    _OF_TEXT, summary="How well texts belong together", passed_fields=fields.SCORE, inputs=_SCORED
)
_RERANK = replace(
    _OF_TEXT,
    summary="Documents in the order in which they answer a query",
    passed_fields=fields.RERANK,
    inputs=("query", "documents", "instruction"),
    answer=fields.RANKED,
)
_GENERATE = replace(_OF_TEXT, kind=EndpointKind.GENERATE, tag="generation", answer=fields.GENERATED)
_TOKENS = replace(_OF_TEXT, kind=EndpointKind.TOKENIZE, tag="tokens", served_by=ServedBy.ANY)
_SOUND = Endpoint(
    "",
    EndpointKind.SOUND,
    "audio",
    "",
    form=BodyForm.FORM,
    passed_fields=fields.SOUND,
    required=("file",),
    inputs=("prompt",),
    answer=fields.WRITTEN,
    streams=True,
    takes_media=True,
)

FORWARDED = (
    CHAT,
    MESSAGES,
    COUNT_TOKENS,
    replace(
        _GENERATE,
        path="/v1/chat/completions/batch",
        summary="Several chats at once; a choice for each",
        passed_fields=fields.CHAT_BATCH,
        inputs=("messages",),
        served_by=ServedBy.ALONE,
    ),
    replace(
        _GENERATE,
        path="/v1/completions",
        summary="Completions of a text, of token ids, or of a list of either",
        passed_fields=fields.COMPLETION,
        inputs=("prompt",),
        refused_fields=("prompt_embeds",),
        streams=True,
        served_by=ServedBy.STAGES,
    ),
    replace(_POOLING, path="/v1/embeddings", summary="Embeddings of texts"),
    replace(
        _POOLING,
        path="/pooling",
        summary="A pooling model's output for texts",
        refused_fields=("data",),  # for plugins, which fetch what it names
    ),
    replace(_OF_TEXTS, path="/classify", summary="Classes of texts"),
    *(replace(_SCORE, path=path) for path in ("/score", "/v1/score")),
    *(replace(_RERANK, path=path) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    replace(_SOUND, path="/v1/audio/transcriptions", summary="The text of a sound"),
    replace(_SOUND, path="/v1/audio/translations", summary="The text of a sound, in another language"),
    replace(
        _TOKENS,
        path=TOKENIZE_PATH,
        summary="Token ids of a text, or of a chat as the model's template writes it",
        passed_fields=fields.TOKENIZE,
        inputs=("prompt", "messages"),
        answer=fields.TOKENS,
    ),
    replace(
        _TOKENS,
        path="/detokenize",
        summary="The text of token ids",
        passed_fields=fields.DETOKENIZE,
        inputs=("tokens",),
        answer=fields.TEXT_OF_TOKENS,
    ),
    CREATE_RESPONSE,
    GET_RESPONSE,
    CANCEL_RESPONSE,
)

ENDPOINTS = (*FORWARDED, *LOCAL)

_MESSAGES_PATHS = frozenset(
    endpoint.path for endpoint in ENDPOINTS if endpoint.chat_form is ChatForm.MESSAGES
)
_FORWARDED_PATHS = frozenset(endpoint.path for endpoint in FORWARDED)


def serves_callers(path: str) -> bool:
    """Return whether a draining gateway must finish requests for `path`."""
    return path.startswith("/v1/") or path in _FORWARDED_PATHS


def chat_form_of(path: str) -> ChatForm:
    return ChatForm.MESSAGES if path in _MESSAGES_PATHS else ChatForm.COMPLETIONS
