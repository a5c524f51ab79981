"""What a family of models is to a test."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

MAX_MODEL_LEN = 4096


class MediaKind(StrEnum):
    """As vLLM calls a modality."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True)
class Family:
    """A kind of model that vLLM serves, of which a tiny one can be made.

    Args:
        make: writes the model folder. It imports torch and transformers.
        limits: how many items of a kind a request may have; what is not named is not taken.
        towers: the parts of vLLM's model that make embeddings of media, which a prefill_decode does without.
    """

    make: Callable[[Path], None]
    limits: Mapping[MediaKind, int]
    towers: frozenset[str] = frozenset()

    @property
    def engine_options(self) -> list[str]:
        """vLLM's own, for every engine of the family; the number format is the test's choice."""
        limits = json.dumps({str(kind): self.limits.get(kind, 0) for kind in MediaKind})
        return [
            f"--max-model-len={MAX_MODEL_LEN}",
            f"--max-num-batched-tokens={MAX_MODEL_LEN}",
            f"--limit-mm-per-prompt={limits}",
        ]
