"""Which prompts an instance has encoded before."""

from typing import Any

from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import Modality
from triptych_gateway.decision.prefixes import LocalPrefixes
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.request.content_parts import MediaPart
from triptych_gateway.request.image_header import ImageHeader
from triptych_gateway.request.media import TakenItem

LIFE = ("pd-0", "boot")


def request(*contents: list[str], salt: str = "") -> tuple[ChatRequest, list[TakenItem]]:
    """Messages of texts and images; an image is a letter after `@`, and its part is empty once taken."""
    messages: list[dict[str, Any]] = []
    items: list[TakenItem] = []
    for index, content in enumerate(contents):
        parts: list[Any] = []
        for place, text in enumerate(content):
            if text.startswith("@"):
                part = MediaPart(len(items), ("messages", index, "content", place), Modality.IMAGE, "", "")
                image = ImageHeader("PNG", 8, 8)
                items.append(TakenItem(part, MmHash(text[1] * 64), b"x", image, {}, {}))
                parts.append(None)
            else:
                parts.append({"type": "text", "text": text})
        messages.append({"role": "user", "content": parts})
    body = {"messages": messages}
    chat = ChatRequest(body, "m", True, tuple(item.part for item in items), {}, {}, 0)
    return chat.of_tenant(salt), items


def test_the_next_turn_is_known_with_all_its_images_so_far() -> None:
    prefixes = LocalPrefixes()
    assert prefixes.find(*request(["hello", "@a"])) is None
    prefixes.remember(*request(["hello", "@a", "and", "@b"]), LIFE)
    assert prefixes.find(*request(["hello", "@a", "and", "@b"], ["next", "@c"])) == (LIFE, 2)
    assert prefixes.find(*request(["hello", "@a", "or", "@b"])) == (LIFE, 1)


def test_another_prompt_or_tenant_is_not() -> None:
    prefixes = LocalPrefixes()
    prefixes.remember(*request(["hello", "@a"]), LIFE)
    assert prefixes.find(*request(["good day", "@a"])) is None
    assert prefixes.find(*request(["first"], ["hello", "@a"])) is None
    assert prefixes.find(*request(["hello", "@b"])) is None
    assert prefixes.find(*request(["hello", "@a"], salt="red")) is None
    assert prefixes.find(*request(["hello"])) is None


def test_the_images_before_count() -> None:
    prefixes = LocalPrefixes()
    prefixes.remember(*request(["@a", "@b"]), LIFE)
    assert prefixes.find(*request(["@c", "@b"])) is None


def test_its_memory_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr("triptych_gateway.decision.prefixes.MAX_LOCAL_PREFIXES", 4)
    prefixes = LocalPrefixes()
    for number in range(100):
        prefixes.remember(*request([f"hello {number}", f"@{chr(97 + number % 26)}"]), LIFE)
    assert len(prefixes._lives) <= 4
    assert len(prefixes._items) <= 9
