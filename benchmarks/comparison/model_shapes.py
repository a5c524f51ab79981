"""Shapes of the models that are compared: Qwen2.5-VL, small enough for a core, or as it is.

What matters is the ratio of the two stages per image: about 1 : 1 for a Qwen2.5-VL of 3 B, 1 : 3 for one of
7 B. The times beside each shape are what its scale was chosen for; what a run measures is in its report.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TextShape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class TowerShape:
    hidden: int
    intermediate: int
    depth: int
    heads: int
    full_attention: tuple[int, ...]  # layers that see the whole image; the others see windows


@dataclass(frozen=True)
class Scale:
    """One model, and what its requests look like."""

    name: str
    text: TextShape
    tower: TowerShape
    image_side: int  # pixels, a multiple of 28
    encode_ms: float  # of one image, on one core: what the shape was chosen for
    prefill_ms: float  # of one image's tokens, likewise
    vocabulary: int = 1024
    max_positions: int = 8192

    @property
    def image_tokens(self) -> int:
        """Rows of one image: patches of 14 pixels, four of them make a token."""
        return (self.image_side // 28) ** 2


SCALES: Mapping[str, Scale] = {
    scale.name: scale
    for scale in (
        Scale(
            "s", TextShape(256, 768, 6, 4, 2), TowerShape(128, 384, 3, 4, (2,)), 448, 40.0, 40.0
        ),
        Scale(
            "m", TextShape(512, 1536, 6, 8, 2), TowerShape(256, 640, 4, 4, (3,)), 448, 155.0, 150.0
        ),
        Scale(
            "l", TextShape(768, 2304, 8, 12, 4), TowerShape(256, 640, 4, 4, (3,)), 448, 155.0, 450.0
        ),
        # A tower that outweighs its language model: four images are encoding and hardly anything else.
        Scale(
            "t", TextShape(256, 768, 2, 4, 2), TowerShape(256, 640, 4, 4, (3,)), 448, 155.0, 15.0
        ),
        # True shapes of Qwen2.5-VL-3B, for a GPU. The tokenizer is the small one: ids beyond it are not sent.
        Scale(
            "3b", TextShape(2048, 11008, 36, 16, 2), TowerShape(1280, 3420, 32, 16, (7, 15, 23, 31)),
            1008, 30.0, 30.0, vocabulary=151_936, max_positions=32_768,
        ),
    )
}  # fmt: skip
