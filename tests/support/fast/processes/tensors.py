"""What the stand-ins for the model compute: a tensor of an image, an answer of tensors and text."""

import io
import random
from collections.abc import Iterator, Sequence

from blake3 import blake3
from PIL import Image

MODEL = "fast-vl"
DIGEST = blake3(b"fast-vl").hexdigest()  # of the namespace
WIDTH = 64
WIDE_WIDTH = 16_384  # of an item whose transfer takes time: up to 144 rows of 64 KiB
WIDE_FROM = 1 << 40  # numbers of such images
DTYPE = "float32"
CHUNK_BYTES = 1 << 20
MAX_GRID = 12  # patches per side: an item has up to 144 rows of 256 bytes
DEFAULT_TOKENS = 8


def png(number: int, side: int | None = None) -> bytes:
    """An image of its own for each number; `side` pixels, 1 to 12 unless given."""
    rng = random.Random(number)
    width, height = (side, side) if side else (rng.randint(1, MAX_GRID), rng.randint(1, MAX_GRID))
    image = Image.frombytes("RGB", (width, height), rng.randbytes(3 * width * height))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=None)
    return buffer.getvalue() + number.to_bytes(8, "big")  # behind the image's end: no two are alike


def wide_png(number: int) -> bytes:
    """An image whose tensor has 9 MiB, as that of a photograph in a large model."""
    return png(WIDE_FROM + number, MAX_GRID)


def width_of(media: bytes) -> int:
    """Of a row of its tensor."""
    return WIDE_WIDTH if int.from_bytes(media[-8:], "big") >= WIDE_FROM else WIDTH


def grid_of(media: bytes) -> tuple[int, int, int]:
    """(1, height, width): one row of the tensor per pixel.

    Raises:
        OSError: the bytes are not an image.
    """
    with Image.open(io.BytesIO(media)) as image:
        image.load()
        return 1, image.height, image.width


def tensor_bytes(media: bytes, num_rows: int, namespace: str = DIGEST) -> bytes:
    """[num_rows, `width_of`] of DTYPE: another one in each namespace."""
    return b"".join(tensor_chunks(media, num_rows, namespace))


def tensor_chunks(media: bytes, num_rows: int, namespace: str = DIGEST) -> Iterator[bytes]:
    """The same bytes, each chunk within a millisecond."""
    source, num_bytes = blake3(_in_namespace(media, namespace)), num_rows * width_of(media) * 4
    for first in range(0, num_bytes, CHUNK_BYTES):
        yield source.digest(length=min(CHUNK_BYTES, num_bytes - first), seek=first)


def word_of(tensor: bytes) -> str:
    """The model's output for an item."""
    return f"i{blake3(tensor).hexdigest()[:16]}"


def word_of_media(media: bytes, namespace: str = DIGEST) -> str:
    _, height, width = grid_of(media)
    return word_of(tensor_bytes(media, height * width, namespace))


def answer_words(items: Sequence[str], text: str, num_tokens: int, namespace: str = DIGEST) -> list[str]:
    """The answer, token by token: the items in their order, the text, and what else it takes.

    The text's word tells the namespace of the instance that answers.
    """
    words = [*items, f"t{blake3(_in_namespace(text.encode(), namespace)).hexdigest()[:16]}"]
    return words + [f"w{index}" for index in range(num_tokens - len(words))]


def _in_namespace(content: bytes, namespace: str) -> bytes:
    return content if namespace == DIGEST else content + namespace.encode()
