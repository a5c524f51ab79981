"""A prompt as an engine renders it from a request's body: the records' items, and a token for each text."""

import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from tests.support.vllm_connector.fake_engine import FakeFeature, FakeRequest, fake_request

TEXT, ITEM = 1, 1000  # tokens: between items; of an item's first


@dataclass(frozen=True)
class Prompt:
    remaining_ms: int
    rows: tuple[tuple[str, int], ...]  # (mm_hash, embeddings) of each item
    texts: tuple[str, ...]
    kv_transfer_params: dict[str, Any] | None

    def features(self) -> list[FakeFeature]:
        return self._request().mm_features

    def tokens(self, rendered_at: int = 0) -> tuple[int, ...]:
        """`rendered_at`: what the template puts in of the time; 0: nothing."""
        tokens: list[int] = []
        for feature in self.features():
            position = feature.mm_position
            tokens += [TEXT] * (position.offset - len(tokens))
            tokens += [ITEM + int(feature.identifier, 16)] * position.length
        tokens += [zlib.crc32(text.encode()) + rendered_at for text in self.texts]
        return tuple(tokens)

    def _request(self) -> FakeRequest:
        return fake_request("rendered", list(self.rows), gap=1)


def prompt_of(body: bytes) -> Prompt:
    parsed = orjson.loads(body)
    params = parsed["ec_transfer_params"]
    return Prompt(
        params["remaining_ms"],
        tuple((each["mm_hash"], each["num_embeds"]) for each in params["items"]),
        tuple(_text_of(message["content"]) for message in parsed["messages"]),
        parsed.get("kv_transfer_params"),
    )


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")
