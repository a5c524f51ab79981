"""What the gateway's tests send: a model, images, and files of API keys."""

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

MODEL = "fake-vl"
DIGEST = "f" * 64


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


def refusal_of(answer: httpx.Response) -> tuple[int, str, str | None]:
    """Return the status, code and param of an answer that is an error."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def entry(name: str, key: str, tenant: str | None = None, **limits: int | list[str]) -> str:
    """One key of the file."""
    lines = "" if tenant is None else f'tenant = "{tenant}"\n'
    lines += "".join(f"{limit} = {json.dumps(value)}\n" for limit, value in limits.items())
    return f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(key)}"\n{lines}'


def write_keys(path: Path, *entries: str) -> Path:
    """The file of keys at `path`, changed in one step."""
    new = path.with_suffix(".new")
    new.write_text("".join(entries))
    new.chmod(0o600)
    return new.rename(path)


KEYS = (
    entry("alice", "key-alice", "red")
    + entry("anna", "key-anna", "red")
    + entry("bob", "key-bob", "blue")
    + entry("carol", "key-carol")
)
