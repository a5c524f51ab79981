"""Batches, tokens, models, what the model does not serve; and the table of all."""

from tests.support.real.bodies import chat, completions
from tests.support.real.bodies.case import Case, Table, table
from tests.support.real.bodies.chat import TOOL, USER, image, text
from triptych_gateway.endpoints.endpoint import EndpointKind
from triptych_gateway.endpoints.table import FORWARDED

PROMPT = completions.PROMPT
_CHATS = [[USER], [{"role": "user", "content": "digits"}]]

BATCHES: Table = {
    **table(
        "/v1/chat/completions/batch",
        {
            "plain": {"messages": _CHATS},
            "logprobs": {"messages": _CHATS, "logprobs": True},
            "one chat": {"messages": [[USER]]},
            "priority": {"messages": _CHATS, "priority": 4},
            "not streamed": {"messages": [[USER]], "stream": False},
            "tools": {"messages": [[USER]], "tools": [TOOL]},
            "empty": {"messages": []},
            "negative temperature": {"messages": _CHATS, "temperature": -1},
        },
        chat.GREEDY,
    ),
    **table(
        "/v1/chat/completions/batch",
        {"unknown model": {"messages": _CHATS, "model": "other"}},
        chat.GREEDY,
        own_words=True,
    ),
    **table(
        "/v1/chat/completions/batch",
        {"streamed": {"messages": [[USER]], "stream": True}},
        chat.GREEDY,
        own_status=400,
        why="vLLM does not stream here, and answers with what its last step or steps had",
    ),
}
TOKENS: Table = {
    **table(
        "/tokenize",
        {
            "text": {"prompt": PROMPT},
            "no model": {"prompt": PROMPT, "model": None},
            "empty text": {"prompt": ""},
            "without special tokens": {"prompt": PROMPT, "add_special_tokens": False},
            "strings": {"prompt": PROMPT, "return_token_strs": True},
            "placeholders": {"prompt": "an <|image_pad|> alone"},
            "chat": {"messages": [USER]},
            "chat of parts": {"messages": [{"role": "user", "content": [text("a")]}]},
            "without the answer's beginning": {
                "messages": [USER], "add_generation_prompt": False, "return_token_strs": True,
            },
            "nothing": {},
            "both ends": {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
        },
    ),
    **table("/tokenize", {"unknown model": {"prompt": PROMPT, "model": "other"}}, own_words=True),
    **table(
        "/detokenize",
        {
            "tokens": {"tokens": [5, 6, 7, 8]},
            "no tokens": {"tokens": []},
            "nothing": {},
            "no token": {"tokens": [10**9]},
        },
    ),
    **table("/detokenize", {"text": {"tokens": "a"}}, own_words=True),
}  # fmt: skip
MODELS: Table = {
    "health": Case("/health", None),
    "ping": Case("/ping", None),
    "no such path": Case("/v1/nothing", None, own_words=True),
    "another method": Case("/v1/completions", None, own_words=True),
}
NOT_SERVED: Table = {
    f"{endpoint.path}: not served": Case(endpoint.path, dict.fromkeys(endpoint.inputs, "a"), own_words=True)
    for endpoint in FORWARDED
    if endpoint.kind is EndpointKind.POOL
}
TEXT_ONLY: Table = table(
    "/tokenize",
    {"an image": {"messages": [{"role": "user", "content": [image(10)]}]}},
    own_status=400,
    why="encoders alone know an item's size",
)

ALL: Table = chat.TABLE | completions.TABLE | BATCHES | TOKENS | MODELS | NOT_SERVED | TEXT_ONLY
