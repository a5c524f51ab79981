"""Prompts that an instance has computed, as far as its caches may still have them. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_gateway.request.chat_request import SALT_FIELD, ChatRequest
from triptych_gateway.request.content_parts import lists_before
from triptych_gateway.request.media import TakenItem
from triptych_gateway.routing.instances import Incarnation

MAX_LOCAL_PREFIXES = 4096


class LocalPrefixes:
    """Prompts known by their bytes up to an item's place and the items before it."""

    def __init__(self) -> None:
        self._lives: LRUCache[tuple[MmHash, int], Incarnation] = LRUCache(MAX_LOCAL_PREFIXES)
        self._items: Counter[MmHash] = Counter()  # bounded by the rows above, recounted now and then

    def remember(self, request: ChatRequest, items: Sequence[TakenItem], life: Incarnation) -> None:
        """Record that `life` has answered `request`, whose media it encoded."""
        for item, prefix in zip(items, _item_prefixes(request, items), strict=True):
            self._lives[item.mm_hash, prefix] = life
            self._items[item.mm_hash] += 1
        if len(self._items) > 2 * MAX_LOCAL_PREFIXES:
            self._items = Counter(mm_hash for mm_hash, _ in self._lives)

    def find(self, request: ChatRequest, items: Sequence[TakenItem]) -> tuple[Incarnation, int] | None:
        """Return the instance that encoded the prompt's first items, and their number, or None."""
        if not items or items[0].mm_hash not in self._items:
            return None
        found: Incarnation | None = None
        num_items = 0
        for item, prefix in zip(items, _item_prefixes(request, items), strict=True):
            life = self._lives.get((item.mm_hash, prefix))
            if life is None or found not in (None, life):
                break
            found, num_items = life, num_items + 1
        return None if found is None else (found, num_items)


def _item_prefixes(request: ChatRequest, items: Sequence[TakenItem]) -> Iterator[int]:
    """Yield for each item, in the prompt's order, a hash of all before it."""
    done, before = 0, hash(request.body.get(SALT_FIELD))
    for item in items:
        messages, *within = lists_before(request.body, item.part.place)
        if done < len(messages):
            before = hash((before, orjson.dumps(messages[done:])))
            done = len(messages)
        yield hash((before, *map(orjson.dumps, within)))
        before = hash((before, item.mm_hash))


MAX_HELD_PREFIXES = 16_384
MAX_NEW_BYTES = 8192  # of text beyond what is held: more is worth a prefill


_MESSAGES = "messages"
_SHAPES_PROMPT = ("system", "tools", "chat_template_kwargs", "reasoning_effort")


class HeldPrefixes:
    """Conversations known by their messages so far and the items in them."""

    def __init__(self) -> None:
        self._lives: LRUCache[int, Incarnation] = LRUCache(MAX_HELD_PREFIXES)

    def remember(self, request: ChatRequest, items: Sequence[TakenItem], life: Incarnation) -> None:
        *_, last = (None, *_message_prefixes(request, items))
        if last is not None:
            self._lives[last[0]] = life

    def find(self, request: ChatRequest, items: Sequence[TakenItem]) -> Incarnation | None:
        """Return the instance that answered all of the conversation but some text at its end, or None."""
        if not self._lives:
            return None
        found: Incarnation | None = None
        num_new_bytes = 0
        for prefix, num_bytes, has_items in _message_prefixes(request, items):
            life = self._lives.get(prefix)
            if life is not None:
                found, num_new_bytes = life, 0
                continue
            num_new_bytes += num_bytes
            if has_items:
                found = None
        return found if num_new_bytes <= MAX_NEW_BYTES else None


def _message_prefixes(request: ChatRequest, items: Sequence[TakenItem]) -> Iterator[tuple[int, int, bool]]:
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
    before = hash((request.body.get(SALT_FIELD), request.model, shape))
    for index, message in enumerate(messages):
        text = orjson.dumps(message)
        own = tuple(of_message.get(index, ()))
        before = hash((before, text, own))
        yield before, len(text), bool(own)
