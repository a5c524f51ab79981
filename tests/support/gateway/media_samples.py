"""Images for the gateway's tests."""

import base64
import io
from typing import Any

from PIL import Image


def image_bytes(color: int = 128, size: tuple[int, int] = (8, 8), image_format: str = "PNG") -> bytes:
    """A plain gray picture."""
    buffer = io.BytesIO()
    Image.new("L", size, color).save(buffer, image_format)
    return buffer.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def image_part(color: int = 128, size: tuple[int, int] = (8, 8)) -> dict[str, Any]:
    """A picture in a chat; those of different colours are different items."""
    return {"type": "image_url", "image_url": {"url": data_url(image_bytes(color, size))}}
