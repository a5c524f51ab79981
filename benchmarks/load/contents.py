"""Images and texts that no cache can know: all from a seed, so that every system gets the same bytes."""

import base64
import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

Part = Mapping[str, Any]
WORDS = (
    "read", "the", "digits", "of", "this", "strip", "from", "left", "to", "right", "and", "count", "how",
    "many", "there", "are", "then", "say", "which", "one", "comes", "first", "last", "twice", "sum", "even",
)  # fmt: skip


def new_image(rng: random.Random, width: int, height: int | None = None) -> Part:
    """A content part: a PNG of so many pixels (a square without `height`), some 10 to 100 KB."""
    picture = Image.frombytes("RGB", (16, 16), rng.randbytes(16 * 16 * 3)).resize((width, height or width))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


class TextMaker:
    """Texts of a wanted number of tokens, by a model's own tokenizer."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._sizes = {word: self.count(f" {word}") for word in WORDS}

    def new_text(self, rng: random.Random, num_tokens: int) -> str:
        """Random words, `num_tokens` or a few more; its beginning is new too, so that no prefix is known."""
        words = [f"{rng.getrandbits(32):x}"]
        counted = self.count(words[0])
        while counted < num_tokens:
            word = rng.choice(WORDS)
            words.append(word)
            counted += self._sizes[word]
        return " ".join(words)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
