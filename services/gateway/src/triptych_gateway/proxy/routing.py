"""Facts in a request's body, and rules in its headers, for the choice of an instance.

Front ends that have chosen already, such as llm-d's router, name instances. A header only narrows the
choice among instances that are registered: no connection is opened to an address because a header has it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Network
from typing import Any

import orjson
from blake3 import blake3
from pydantic import TypeAdapter, ValidationError
from starlette.types import Scope

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.ids import MmHash, Name
from triptych_gateway.access.auth import Caller
from triptych_gateway.request.chat_request import SALT_FIELD, ChatRequest
from triptych_gateway.request.content_parts import Place
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.request_body import header_of
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.scheduling.candidates import (
    MAX_PREFIX_BYTES,
    PromptBlocks,
    RoutingRequest,
    ServingStage,
    divide_prompt,
)
from triptych_gateway.routing.served_models import ServedModels
from triptych_gateway.routing.variants import RouteDemand, join_host
from triptych_gateway.tracing.trace_trust import comes_from

SESSION_FIELDS = ("prompt_cache_key", "user")  # OpenAI's
CUT_DEPTH = 3  # a message, its content, a part of it
MAX_CUT_PARTS = 1000  # of each; in more of them each is short
MIN_TOKEN_BYTES = 2  # of a token in JSON, with its comma
_FIRST_FIELDS = ("tools", "system", "instructions")  # of a body: templates put them before the conversation
VERSION_HEADER = "X-Triptych-Version"
HOST_HEADERS: Mapping[ServingStage, tuple[str, ...]] = {
    ServingStage.PREFILL: ("x-prefiller-host-port", "x-prefiller-host-ports", "x-llm-d-prefiller-host-port"),
    ServingStage.DECODE: ("x-data-parallel-host-port",),
}
"""Headers of llm-d by stage. The first one present counts, as in llm-d's sidecar."""
MAX_HOSTS = 64
MAX_PROMPT_CHARS = 256  # prompt without messages, whose beginning stands for its conversation
MAX_PROMPT_TOKENS = 64  # the same in tokens
MAX_TEXT_CHARS = 4096  # of a message's text
_SYSTEM_FIELDS = ("system", "instructions")  # fields before all messages, in some forms of chats
_VERSION = TypeAdapter(Name)


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
    seed = (request.model, digest, request.body.get(SALT_FIELD))
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
    seed = (request.model, None, request.body.get(SALT_FIELD))
    read_prompt = partial(_read_prompt, request.body, request.endpoint.inputs, {}, seed)
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


@dataclass(frozen=True, slots=True)
class RoutingHeaders:
    """Reader of routing headers, which count from callers with one of `keys`, by name, or in `networks`."""

    models: ServedModels
    keys: frozenset[str] = frozenset()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    def read(
        self, scope: Scope, caller: Caller, body: Mapping[str, Any], inputs: Iterable[str], request_id: str
    ) -> RouteDemand:
        """Read the routing headers of one request.

        Raises:
            RequestError: 403, the caller may not set them; 400, a header is malformed.
        """
        session = header_of(scope, self.models.content.session_header.lower().encode())
        return RouteDemand(
            _SessionKey(caller, session, body, inputs, request_id),
            self._version(scope, caller),
            dict(self._hosts(scope, caller)),
        )

    def _version(self, scope: Scope, caller: Caller) -> str | None:
        version = header_of(scope, VERSION_HEADER.lower().encode())
        if version is None:
            return None
        if not self.models.content.version_header and not self._is_front_end(scope, caller):
            raise _not_allowed(VERSION_HEADER)
        try:
            return _VERSION.validate_python(version)
        except ValidationError as error:
            message = f"{VERSION_HEADER} must be the label of a version"
            raise RequestError(400, "invalid_value", message, VERSION_HEADER) from error

    def _hosts(self, scope: Scope, caller: Caller) -> Iterator[tuple[ServingStage, frozenset[str]]]:
        if not self.keys and not self.networks:
            return
        for stage, names in HOST_HEADERS.items():
            found = ((name, header_of(scope, name.encode())) for name in names)
            name, value = next(((name, value) for name, value in found if value is not None), ("", ""))
            if not value:
                continue
            if not self._is_front_end(scope, caller):
                raise _not_allowed(name)
            yield stage, _parse_hosts(name, value)

    def _is_front_end(self, scope: Scope, caller: Caller) -> bool:
        return caller.key_name in self.keys or comes_from(scope, self.networks)


def _not_allowed(header: str) -> RequestError:
    message = f"{header} may not be set by this caller"
    return RequestError(HTTPStatus.FORBIDDEN, "header_not_allowed", message, header)


def _parse_hosts(header: str, value: str) -> frozenset[str]:
    """Parse a list of `host:port`, normalized for comparison."""
    hosts = [each.strip() for each in value.split(",") if each.strip()]
    found = set()
    for each in hosts[: MAX_HOSTS + 1]:
        host, _, port = each.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or len(port) > 5:
            raise RequestError(400, "invalid_value", f"{header}: {each[:100]!r} is not host:port", header)
        found.add(join_host(host.removeprefix("[").removesuffix("]"), int(port)))
    if not 0 < len(hosts) <= MAX_HOSTS:
        message = f"{header} must name 1 to {MAX_HOSTS} instances"
        raise RequestError(400, "invalid_value", message, header)
    return frozenset(found)


class _SessionKey:
    """Key that all requests of a conversation share, with their caller's, so that callers are spread.

    Computed at first use: most requests have only one place to go.
    """

    __slots__ = ("_body", "_caller", "_found", "_inputs", "_request_id", "_session")

    def __init__(
        self,
        caller: Caller,
        session: str | None,
        body: Mapping[str, Any],
        inputs: Iterable[str],
        request_id: str,
    ) -> None:
        self._caller, self._session, self._request_id = caller, session, request_id
        self._body, self._inputs = body, inputs
        self._found: bytes | None = None

    def __call__(self) -> bytes:
        if self._found is None:
            first = [self._session] if self._session else _first_texts(self._body, self._inputs)
            first = first or [self._request_id]
            self._found = blake2b(orjson.dumps([self._caller.owner, *first]), digest_size=16).digest()
        return self._found


def _first_texts(body: Mapping[str, Any], inputs: Iterable[str]) -> list[str]:
    """Return the texts up to a user's first message, without media, whose text may be missing."""
    texts = [text for name in _SYSTEM_FIELDS for text in _texts_of(body.get(name))]
    for name in inputs:
        value = body.get(name)
        if name in _SYSTEM_FIELDS or value is None:
            continue
        if name == "input" and isinstance(value, str):  # the next turn has it as a message
            return [*texts, *_texts_of(value)]
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for message in value:
                if not isinstance(message, dict):
                    break
                texts += _texts_of(message.get("content"))
                if message.get("role") == "user":
                    return texts
        elif beginning := _beginning_of(value):
            texts.append(beginning)
    return texts


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content[:MAX_TEXT_CHARS]]
    parts = content if isinstance(content, list) else ()
    texts = (part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))
    return [text[:MAX_TEXT_CHARS] for text in texts]


def _beginning_of(prompt: Any) -> str:
    """Return the beginning of the prompt, of several prompts the first one's."""
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, list):
        tokens = (each for each in prompt[:MAX_PROMPT_TOKENS] if isinstance(each, int))
        return " ".join(map(str, tokens))
    return prompt[:MAX_PROMPT_CHARS] if isinstance(prompt, str) else ""
