"""What the choice of an instance goes by, of bodies in every form."""

from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from triptych_gateway.endpoints.table import CHAT, COUNT_TOKENS, ENDPOINTS
from triptych_gateway.proxy.routing import chat_routing, session_of, text_routing
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.text_request import TextRequest
from triptych_gateway.routing.scheduling.candidates import ITEM_BYTES, MAX_PREFIX_BYTES, PromptBlocks

LONG, OTHER = "a long text " * 40, "another text " * 40
DOG, CAT = "d" * 64, "c" * 64


def endpoint_of(path: str) -> Any:
    return next(each for each in ENDPOINTS if each.path == path and "POST" in each.methods)


def item(mm_hash: str, *place: str | int) -> Any:
    return SimpleNamespace(mm_hash=mm_hash, part=SimpleNamespace(place=place))


def blocks_of(body: dict[str, Any], *items: Any, path: str = CHAT.path, salt: str = "") -> PromptBlocks:
    request = ChatRequest(
        body=body,
        model="m",
        stream=False,
        media=(),
        processor_options={},
        media_io_options={},
        endpoint=endpoint_of(path),
    ).of_tenant(salt)
    return chat_routing(request, "", "digest", items).prompt


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def num_alike(one: PromptBlocks, other: PromptBlocks) -> int:
    pairs = zip(one.blocks, other.blocks, strict=False)
    return sum(left.num_bytes for left, right in pairs if left == right)


FIELDS = {"/v1/chat/completions": "messages", "/v1/messages": "messages", "/v1/responses": "input"}
PROMPTS = (LONG, [LONG, LONG], list(range(500)), [list(range(500))], "", [], None)


@pytest.mark.parametrize(("path", "name"), FIELDS.items())
def test_a_conversation_that_goes_on_begins_alike(path: str, name: str) -> None:
    said = [{"role": "user", "content": LONG}, {"role": "assistant", "content": OTHER}]
    before = blocks_of({name: said}, path=path)
    after = blocks_of({name: [*said, {"role": "user", "content": LONG}]}, path=path)
    assert after.blocks[: len(before.blocks)] == before.blocks
    assert sum(block.num_bytes for block in before.blocks) > 900


def test_items_stand_where_they_are_in_the_message() -> None:
    text = {"type": "text", "text": LONG}
    body = {"messages": [user(text, None, None)]}
    places = [("messages", 0, "content", index) for index in (1, 2)]
    one = blocks_of(body, *(item(name, *place) for name, place in zip((DOG, CAT), places, strict=True)))
    other = blocks_of(body, *(item(DOG, *place) for place in places))
    alike = num_alike(one, other)
    assert len(LONG) + ITEM_BYTES <= alike < 2 * ITEM_BYTES
    swapped = blocks_of({"messages": [user(None, text)]}, item(DOG, "messages", 0, "content", 0))
    assert num_alike(one, swapped) == 0


def test_tools_and_instructions_come_first_and_other_fields_do_not_count() -> None:
    body = {"messages": [user({"type": "text", "text": LONG})], "temperature": 0.5}
    assert blocks_of(body) == blocks_of({**body, "temperature": 0.7, "user": "x"})
    assert num_alike(blocks_of(body), blocks_of({**body, "tools": [{"name": LONG}]})) == 0


@pytest.mark.parametrize("salt", ["", "of a tenant"])
def test_only_the_own_tenants_prompts_are_alike(salt: str) -> None:
    body = {"messages": [user({"type": "text", "text": LONG})]}
    assert num_alike(blocks_of(body), blocks_of(body, salt=salt)) == (0 if salt else 512)


@pytest.mark.parametrize("prompt", PROMPTS, ids=[str(each)[:12] for each in PROMPTS])
def test_prompts_of_completions(prompt: Any) -> None:
    request = TextRequest({"prompt": prompt}, "m", False, endpoint_of("/v1/completions"), 9, frozenset())
    found = text_routing(request, "s")
    assert found is not None
    assert (len(found.prompt.blocks) > 0) == bool(prompt)
    assert (found.session, found.num_prompt_bytes) == ("s", 9)


def test_what_is_not_computed_is_not_looked_at() -> None:
    assert text_routing(TextRequest({}, "m", False, COUNT_TOKENS, 0, frozenset()), "") is None


def test_the_name_of_a_conversation() -> None:
    def session(header: bytes | None = None, salt: str = "", **body: Any) -> str:
        headers = [] if header is None else [(b"x-session-id", header)]
        return session_of({"type": "http", "headers": headers}, body, salt, "X-Session-Id")

    assert session() == session(user="", prompt_cache_key=None) == session(user=7) == ""
    named = session(b"one")
    assert len(named) == 64
    assert named == session(user="one") == session(prompt_cache_key="one", user="two")
    assert named == session(b"one", user="two")
    assert session(b"one", salt="of a tenant") not in (named, "")
    assert session(user="\udc80"), "whatever JSON lets through"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "ä" * 3 * MAX_PREFIX_BYTES}],
        [user({"type": "text", "text": "a" * 3 * MAX_PREFIX_BYTES})],
        [user({"type": "text", "text": "a" * (MAX_PREFIX_BYTES // 2)}) for _ in range(5)],
    ],
)
def test_what_is_far_behind_is_not_even_encoded(
    messages: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    dumps = orjson.dumps

    def counted(value: Any) -> bytes:
        sizes.append(len(found := dumps(value)))
        return found

    monkeypatch.setattr(orjson, "dumps", counted)
    found = blocks_of({"messages": messages})
    assert sum(sizes) <= 2.1 * MAX_PREFIX_BYTES, "two bytes for each of its characters"
    assert MAX_PREFIX_BYTES - 4096 <= sum(each.num_bytes for each in found.blocks) <= MAX_PREFIX_BYTES
    assert found.num_bytes == MAX_PREFIX_BYTES


def test_a_long_prompt_of_tokens_is_cut_before_it_is_encoded() -> None:
    found = blocks_of({"model": "m", "prompt": [1] * 3 * MAX_PREFIX_BYTES}, path="/v1/completions")
    assert found.num_bytes == MAX_PREFIX_BYTES
