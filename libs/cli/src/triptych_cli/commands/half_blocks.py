"""A small picture in a terminal: two pixels per character, as half blocks."""

from pathlib import Path

from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text

UPPER_HALF = "▀"


def half_blocks(file: Path, height: int = 16, max_width: int = 100) -> Text:
    """The image in `file`, `height` pixels high (half as many lines), in colours of its own."""
    with Image.open(file) as image:
        width = max(1, min(max_width, round(image.width * height / image.height)))
        pixels = image.convert("RGB").resize((width, height - height % 2)).tobytes()
    colours = [Color.from_rgb(*pixels[at : at + 3]) for at in range(0, len(pixels), 3)]
    rows = [colours[at : at + width] for at in range(0, len(colours), width)]
    text = Text()
    for upper_row, lower_row in zip(rows[::2], rows[1::2], strict=True):
        for upper, lower in zip(upper_row, lower_row, strict=True):
            text.append(UPPER_HALF, Style(color=upper, bgcolor=lower))
        text.append("\n")
    return text
