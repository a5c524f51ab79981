"""Facts in a request's body for the choice of an instance."""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import orjson
from blake3 import blake3
from starlette.types import Scope

from triptych_common.protocol.ids import MmHash
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.places import Place
from triptych_gateway.request.request_body import header_of
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.scheduling.prompt_blocks import MAX_PREFIX_BYTES, PromptBlocks, divide_prompt

SESSION_FIELDS = ("prompt_cache_key", "user")  # OpenAI's
CUT_DEPTH = 3  # a message, its content, a part of it
MAX_CUT_PARTS = 1000  # of each; in more of them each is short
MIN_TOKEN_BYTES = 2  # of a token in JSON, with its comma
_FIRST_FIELDS = ("tools", "system", "instructions")  # of a body: templates put them before the conversation


def session_of(scope: Scope, body: Mapping[str, Any], salt: str, header: str) -> str:
    """Return a digest of the conversation's name in `header` or a field; "" without a name."""
    name: Any = header_of(scope, header.lower().encode())
    for field in SESSION_FIELDS:
        name = name or body.get(field)
    if not isinstance(name, str) or not name:
        return ""
    return blake3(f"{salt}\0{name}".encode(errors="replace")).hexdigest()


def chat_routing(
    request: ChatRequest,
    session: str,
    digest: str | None = None,
    items: Sequence[TakenItem] = (),
    items_at: Mapping[str, Set[MmHash]] | None = None,
) -> RoutingRequest:
    """Return the routing request of a chat; `items_at` are the items that each of several stores has."""
    seed = (request.model, digest, request.tenant_salt)
    by_place = {item.part.place: item.mm_hash for item in items}
    return RoutingRequest(
        request.model,
        session,
        tuple(item.mm_hash for item in items),
        request.num_prompt_bytes,
        partial(_read_prompt, request.body, request.endpoint.inputs, by_place, seed),
        items_at or {},
    )


def text_routing(request: TextRequest, session: str) -> RoutingRequest | None:
    """Return the routing request of a request without media; None if nothing is computed for it."""
    if not request.is_computed:
        return None
    seed = (request.model, None, request.body.get("cache_salt"))
    read_prompt = partial(_read_prompt, request.body, request.inputs, {}, seed)
    return RoutingRequest(request.model, session, (), request.num_prompt_bytes, read_prompt)


def _read_prompt(
    body: Mapping[str, Any], inputs: Sequence[str], items: Mapping[Place, MmHash], seed: object
) -> PromptBlocks:
    names = dict.fromkeys((*_FIRST_FIELDS, *inputs))
    around = {place[:depth] for place in items for depth in range(len(place))}
    return divide_prompt(
        (part for name in names if name in body for part in _parts(body[name], (name,), items, around)), seed
    )


def _parts(
    value: Any, place: Place, items: Mapping[Place, MmHash], around: Collection[Place]
) -> Iterator[bytes | MmHash]:
    """Yield texts and items in the order of the body, message by message, so that prefixes stay equal.

    Args:
        around: places of the parts that hold items.
    """
    if place in items:
        yield items[place]
    elif isinstance(value, str):
        yield value[:MAX_PREFIX_BYTES].encode(errors="replace")
    elif isinstance(value, list) and (place in around or (len(place) == 1 and not _are_tokens(value))):
        for index, each in enumerate(value):
            yield from _parts(each, (*place, index), items, around)
    elif isinstance(value, dict) and place in around:
        for name, each in value.items():
            yield from _parts(each, (*place, name), items, around)
    else:
        yield _dumped(_cut(value))


def _cut(value: Any, depth: int = 0) -> Any:
    """Cut long texts of a message and lists of tokens at `MAX_PREFIX_BYTES`."""
    if isinstance(value, str):
        return value[:MAX_PREFIX_BYTES]
    if isinstance(value, list) and _are_tokens(value):
        return value[: MAX_PREFIX_BYTES // MIN_TOKEN_BYTES]
    if depth < CUT_DEPTH and isinstance(value, dict | list) and len(value) <= MAX_CUT_PARTS:
        if isinstance(value, dict):
            return {name: _cut(each, depth + 1) for name, each in value.items()}
        return [_cut(each, depth + 1) for each in value]
    return value


def _are_tokens(value: list[Any]) -> bool:
    return bool(value) and isinstance(value[0], int)


def _dumped(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # nested too deeply: refused when it is sent
        return b""
