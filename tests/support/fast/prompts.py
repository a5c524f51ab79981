"""Prompts for the stand-in for vLLM, and its outputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3


@dataclass(frozen=True)
class Item:
    """A media item, or a piece of one."""

    mm_hash: str
    num_embeds: int
    prefix: str  # digest of all parts up to this one
    media_hash: str  # the media item's
    media: bytes | None = None  # that the engine is to encode itself; None: an encoder does


@dataclass(frozen=True)
class Token:
    word: str


@dataclass(frozen=True)
class Finished:
    error: str | None = None


Send = Callable[[Token | Finished], None]  # called on the engine's thread


@dataclass
class Prompt:
    request_id: str
    items: tuple[Item, ...]
    text: str
    num_tokens: int
    transfer_params: dict[str, Any] | None
    send: Send


def prefix_digest(before: str, part: str) -> str:
    return blake3(f"{before}|{part}".encode()).hexdigest()
