"""HeldPrefixes: conversations, up to a message, that a decode instance has answered. Pure.

Its KV cache has their prompt then, as a rule, items included: the next turn needs no prefill elsewhere, as
long as what is new is text. This is a guess: the instance refuses a prompt that it does not hold any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.media import TakenItem

MAX_PREFIXES = 16_384
MAX_NEW_BYTES = 8192  # of text beyond what is held: more is worth a prefill

Life = tuple[str, str]  # (instance, boot id)

_MESSAGES = "messages"
_SHAPES_PROMPT = ("system", "tools", "chat_template_kwargs", "reasoning_effort")


class HeldPrefixes:
    """Conversations known by their messages so far and the items in them."""

    def __init__(self) -> None:
        self._lives: LRUCache[int, Life] = LRUCache(MAX_PREFIXES)

    def remember(self, request: ChatRequest, items: Sequence[TakenItem], life: Life) -> None:
        """Record that `life` has answered `request`."""
        *_, last = (None, *_prefixes(request, items))
        if last is not None:
            self._lives[last[0]] = life

    def find(self, request: ChatRequest, items: Sequence[TakenItem]) -> Life | None:
        """Return the instance that answered all of the conversation but some text at its end, or None."""
        if not self._lives:
            return None
        found: Life | None = None
        num_new_bytes = 0
        for prefix, num_bytes, has_items in _prefixes(request, items):
            life = self._lives.get(prefix)
            if life is not None:
                found, num_new_bytes = life, 0
                continue
            num_new_bytes += num_bytes
            if has_items:
                found = None
        return found if num_new_bytes <= MAX_NEW_BYTES else None


def _prefixes(request: ChatRequest, items: Sequence[TakenItem]) -> Iterator[tuple[int, int, bool]]:
    """Yield for each message a hash of the conversation up to its end, its bytes, whether it has items."""
    body: Mapping[str, Any] = request.body
    messages = body.get(_MESSAGES)
    if not isinstance(messages, list):
        return
    of_message: dict[object, list[MmHash]] = {}
    for item in items:
        of_message.setdefault(item.part.place[1] if len(item.part.place) > 1 else None, []).append(
            item.mm_hash
        )
    shape = orjson.dumps([body.get(name) for name in _SHAPES_PROMPT])
    before = hash((request.tenant_salt, request.model, shape))
    for index, message in enumerate(messages):
        text = orjson.dumps(message)
        own = tuple(of_message.get(index, ()))
        before = hash((before, text, own))
        yield before, len(text), bool(own)
