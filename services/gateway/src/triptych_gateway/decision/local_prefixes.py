"""LocalPrefixes: prompts, up to an item, that an instance has encoded itself. Pure.

Its prefix cache usually still has their tokens, so the next turn of a conversation needs no encode there.
Through the encoders, which give the item another name, it would be encoded again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import orjson
from cachetools import LRUCache

from triptych_common.protocol.ids import MmHash
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.places import lists_before

MAX_PREFIXES = 4096

Life = tuple[str, str]  # (instance, boot id)


class LocalPrefixes:
    """Prompts known by their bytes up to an item's place and the items before it."""

    def __init__(self) -> None:
        self._lives: LRUCache[tuple[MmHash, int], Life] = LRUCache(MAX_PREFIXES)
        self._items: Counter[MmHash] = Counter()  # bounded by the rows above, recounted now and then

    def remember(self, request: ChatRequest, items: Sequence[TakenItem], life: Life) -> None:
        """Record that `life` has answered `request`, whose media it encoded."""
        for item, prefix in zip(items, _prefixes(request, items), strict=True):
            self._lives[item.mm_hash, prefix] = life
            self._items[item.mm_hash] += 1
        if len(self._items) > 2 * MAX_PREFIXES:
            self._items = Counter(mm_hash for mm_hash, _ in self._lives)

    def find(self, request: ChatRequest, items: Sequence[TakenItem]) -> tuple[Life, int] | None:
        """Return the instance that encoded the prompt's first items, and their number, or None."""
        if not items or items[0].mm_hash not in self._items:
            return None
        found: Life | None = None
        num_items = 0
        for item, prefix in zip(items, _prefixes(request, items), strict=True):
            life = self._lives.get((item.mm_hash, prefix))
            if life is None or found not in (None, life):
                break
            found, num_items = life, num_items + 1
        return None if found is None else (found, num_items)


def _prefixes(request: ChatRequest, items: Sequence[TakenItem]) -> Iterator[int]:
    """Yield for each item, in the prompt's order, a hash of all before it."""
    done, before = 0, hash(request.tenant_salt)
    for item in items:
        messages, *within = lists_before(request.body, item.part.place)
        if done < len(messages):
            before = hash((before, orjson.dumps(messages[done:])))
            done = len(messages)
        yield hash((before, *map(orjson.dumps, within)))
        before = hash((before, item.mm_hash))
