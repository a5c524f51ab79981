"""Strips of handwritten digits, and the fixed split they are cut from.

The digits are those of scikit-learn's `load_digits` (8x8 pixels, 1797 of them),
kept in `digits.npz`: with scikit-learn installed, every vLLM process would
import it, and SciPy, at its start. One
seeded permutation splits them: the first `NUM_TRAIN` may be trained on, the
rest is held out. A strip is one to five digits side by side, each scaled to
`DIGIT_PX` pixels square, white ink on black.

Needs numpy and pillow only, so that tests may load this file by
its path. The same arguments always give the same strips.

    python strips.py --count 8 --length 3 --seed 1 --out folder
    python strips.py --samples        # writes the samples/ folder next to this file
"""

from __future__ import annotations

import argparse
import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

DATA = Path(__file__).parent / "digits.npz"
MAX_INK = 16  # of a pixel in `DATA`
DIGIT_PX = 56  # two merged patches of 28 pixels, so the image processor never rescales a strip
NUM_TRAIN = 1500
SPLIT_SEED = 0
SAMPLE_SEED = 2024
SAMPLE_LENGTHS = (1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5)

IntArray = npt.NDArray[np.int64]


class Digits(NamedTuple):
    """One side of the split."""

    images: npt.NDArray[np.uint8]  # (count, 8, 8)
    labels: IntArray  # (count,)


class Strip(NamedTuple):
    """One strip as a client would send it, and the answer that is right."""

    png: bytes
    digits: str  # "3 1 4": also the model's expected answer


@functools.cache
def load_split() -> tuple[Digits, Digits]:
    """Return the digits to train on and the digits that are held out."""
    with np.load(DATA) as data:
        images, labels = (data["images"] / MAX_INK * 255).astype(np.uint8), data["labels"].astype(np.int64)
    order = np.random.RandomState(SPLIT_SEED).permutation(len(images))
    train, held_out = order[:NUM_TRAIN], order[NUM_TRAIN:]
    return (
        Digits(images[train], labels[train]),
        Digits(images[held_out], labels[held_out]),
    )


def scale_digit(pixels: npt.NDArray[np.uint8], size_px: int = DIGIT_PX) -> Image.Image:
    """Return one digit as a square greyscale image."""
    return Image.fromarray(pixels).resize((size_px, size_px), Image.Resampling.BILINEAR)


def join_digits(digits: Sequence[Image.Image]) -> Image.Image:
    """Return the strip that shows `digits` from left to right."""
    size = digits[0].height
    strip = Image.new("L", (size * len(digits), size))
    for place, digit in enumerate(digits):
        strip.paste(digit, (place * size, 0))
    return strip.convert("RGB")


def format_answer(labels: Sequence[int]) -> str:
    """Return what the model should say about a strip of `labels`."""
    return " ".join(str(label) for label in labels)


def held_out_strips(
    count: int, length: int | None = 3, seed: int = 0, digit_px: int = DIGIT_PX
) -> list[Strip]:
    """Return `count` strips of held-out digits.

    Args:
        length: digits per strip, or None for a random length from 1 to 5 each.
        seed: strips are a pure function of it and of the other arguments.
        digit_px: side of one digit; the model is trained on `DIGIT_PX`.
    """
    rng = np.random.RandomState(seed)
    held_out = load_split()[1]
    strips = []
    for _ in range(count):
        num_digits = length if length is not None else int(rng.randint(1, 6))
        chosen = rng.randint(0, len(held_out.labels), num_digits)
        image = join_digits([scale_digit(held_out.images[i], digit_px) for i in chosen])
        png = io.BytesIO()
        image.save(png, format="PNG")
        strips.append(Strip(png.getvalue(), format_answer(held_out.labels[chosen].tolist())))
    return strips


def write_strips(folder: Path, strips: Sequence[Strip]) -> None:
    """Write one PNG per strip and `samples.json`, which lists file and digits."""
    folder.mkdir(parents=True, exist_ok=True)
    listing = []
    for index, strip in enumerate(strips):
        name = f"strip-{index:02d}.png"
        (folder / name).write_bytes(strip.png)
        listing.append({"file": name, "digits": strip.digits})
    (folder / "samples.json").write_text(json.dumps(listing, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write strips of held-out handwritten digits.")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--length", type=int, default=None, help="1 to 5; random if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--digit-px", type=int, default=DIGIT_PX)
    parser.add_argument("--out", type=Path, default=Path("strips"))
    parser.add_argument("--samples", action="store_true", help="write the fixed samples/ folder")
    args = parser.parse_args()
    if args.samples:
        chosen = [
            held_out_strips(1, length, SAMPLE_SEED + index)[0] for index, length in enumerate(SAMPLE_LENGTHS)
        ]
        write_strips(Path(__file__).parent / "samples", chosen)
    else:
        write_strips(args.out, held_out_strips(args.count, args.length, args.seed, args.digit_px))


if __name__ == "__main__":
    main()
