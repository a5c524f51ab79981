"""PrefixMemory: blocks of prompts sent to an instance, least recently used ones dropped.

As in vLLM, the end of a prompt is dropped before its beginning. So this approximates the content of its
prefix cache.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from triptych_gateway.routing.scheduling.prompt_blocks import PromptBlock, PromptBlocks

BYTES_PER_TOKEN = 4  # of a text, about
DEFAULT_BYTES = 4 << 20  # of prompts, without an announced capacity
MAX_BLOCKS = 65_536  # whatever it holds: about 10 MB of this gateway


class PrefixMemory:
    """Memory of prompts sent to one instance."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._sizes: OrderedDict[int, int] = OrderedDict()  # of blocks by chain; the latest used last
        self._num_bytes = 0
        self._max_blocks = max_blocks
        self._max_bytes = DEFAULT_BYTES

    def __len__(self) -> int:
        return len(self._sizes)

    def set_capacity(self, kv_cache_tokens: int | None) -> None:
        """Set the capacity that the instance announces."""
        self._max_bytes = DEFAULT_BYTES if kv_cache_tokens is None else kv_cache_tokens * BYTES_PER_TOKEN
        self._trim()

    def remember(self, blocks: Sequence[PromptBlock]) -> tuple[int, ...]:
        """Remember a prompt that goes to the instance; return the chains that are new."""
        new = tuple(block.chain for block in blocks if block.chain not in self._sizes)
        for block in reversed(blocks):
            if block.chain in self._sizes:
                self._sizes.move_to_end(block.chain)
            else:
                self._sizes[block.chain] = block.num_bytes
                self._num_bytes += block.num_bytes
        self._trim()
        return new

    def forget(self, chains: Iterable[int]) -> None:
        """Forget chains that were never computed."""
        for chain in chains:
            self._num_bytes -= self._sizes.pop(chain, 0)

    def share_of(self, prompt: PromptBlocks) -> float:
        """Return the share of the prompt, from the beginning, that was sent before: 0 to 1."""
        known = 0
        for block in prompt.blocks:
            if block.chain not in self._sizes:
                break
            known += block.num_bytes
        return known / prompt.num_bytes if known else 0.0

    def clear(self) -> None:
        """Forget everything, since the instance was restarted."""
        self._sizes.clear()
        self._num_bytes = 0

    def _trim(self) -> None:
        while self._sizes and (self._num_bytes > self._max_bytes or len(self._sizes) > self._max_blocks):
            _, num_bytes = self._sizes.popitem(last=False)
            self._num_bytes -= num_bytes
