"""A prompt as a chain of hashes: two prompts have as many blocks alike as they begin alike.

The gateway has no tokenizer, so it goes by the bytes of what the model reads, in the order of the
conversation. A media item ends a block, with its mm_hash. Blocks grow with their place, so that a long prompt
has few; the rest after the last whole block is part of none.

Python's own hash is used: it is keyed by process, and it is faster than a hash over several processes. A
collision costs a bad choice, and no more.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from triptych_common.protocol.ids import MmHash

ITEM_BYTES = 2048  # that an item counts for: its tokens are not known here
MAX_PREFIX_BYTES = 1 << 20  # bytes beyond this make no difference
_SIZES = ((64, 128), (192, 512))  # (up to this block, bytes of each); then:
_LAST_SIZE = 4096


class PromptBlock(NamedTuple):
    """One piece of a prompt, hashed with all that comes before it."""

    chain: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """Blocks of one prompt; `num_bytes` includes counted bytes outside of blocks."""

    blocks: tuple[PromptBlock, ...] = ()
    num_bytes: int = 0


def divide_prompt(parts: Iterable[bytes | MmHash], seed: Hashable) -> PromptBlocks:
    """Return the blocks of a prompt of these texts and items. 100 KB take 0.1 ms.

    Args:
        seed: further parts of the identity: model or LoRA adapter, namespace digest, the tenant's salt.
    """
    blocks: list[PromptBlock] = []
    chain, rest, num_bytes = hash(seed), b"", 0
    for part in parts:
        if isinstance(part, str):
            chain = hash((chain, rest, part))
            blocks.append(PromptBlock(chain, len(rest) + ITEM_BYTES))
            rest, num_bytes = b"", num_bytes + ITEM_BYTES
            if num_bytes >= MAX_PREFIX_BYTES:
                break
            continue
        part = part[: MAX_PREFIX_BYTES - num_bytes]
        num_bytes += len(part)
        rest += part
        start = 0
        while len(rest) - start >= (size := _size_of(len(blocks))):
            chain = hash((chain, rest[start : start + size]))
            blocks.append(PromptBlock(chain, size))
            start += size
        rest = rest[start:]
        if num_bytes >= MAX_PREFIX_BYTES:
            break
    return PromptBlocks(tuple(blocks), num_bytes)


def _size_of(block: int) -> int:
    for up_to, size in _SIZES:
        if block < up_to:
            return size
    return _LAST_SIZE
