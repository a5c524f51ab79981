"""Item record: what a language model needs to know of media that it never sees.

The encoder's renderer is the only one that looks at the media. The record keeps its results: the tokens
that stand for the item in the prompt, which of them are embeddings, and the few fields that the language
model itself reads (grids, lengths, seconds). An engine without an encoder replays the record, so that every
family of models is served in one way, and nothing is preprocessed twice.

It follows from the mm_hash alone, and is kept with it. The namespace digest covers its form.
No part of it is code: names, numbers, and arrays of numbers.
"""

import binascii
import math
import zlib
from base64 import b64decode, b64encode
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, StringConstraints

RECORD_VERSION: Literal[1] = 1
MAX_RECORD_FIELDS = 16
MAX_RECORD_UPDATES = 4
MAX_TARGET_TOKENS = 64
MAX_PIECES = 32  # of one video
MAX_ARRAY_BYTES = 8 << 20  # unpacked
MAX_PACKED_CHARS = 1 << 20
TOKEN_DTYPE = "int32"

ArrayDtype = Literal[
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
]
NUMBER_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


class _Part(BaseModel):
    # Strict: the namespace's digest contains RECORD_VERSION, so no other release's records arrive here.
    model_config = ConfigDict(frozen=True, extra="forbid")


class PackedArray(_Part):
    """Numbers in C order, little endian, compressed: masks and token ids are long and repeat themselves."""

    dtype: ArrayDtype
    shape: tuple[NonNegativeInt, ...] = Field(max_length=4)
    data: Annotated[str, StringConstraints(max_length=MAX_PACKED_CHARS, pattern=r"^[A-Za-z0-9+/]*={0,2}$")]

    def model_post_init(self, context: Any) -> None:
        """Refuse (ValueError) an array that is too large."""
        if self.num_bytes > MAX_ARRAY_BYTES:
            raise ValueError("the array is too large")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * NUMBER_BYTES[self.dtype]

    @classmethod
    def pack(cls, dtype: ArrayDtype, shape: tuple[int, ...], content: bytes) -> "PackedArray":
        return cls(dtype=dtype, shape=shape, data=b64encode(zlib.compress(content, 6)).decode())

    def unpack(self) -> bytes:
        """Return all `num_bytes` bytes of the array.

        Raises:
            ValueError: they are not what `shape` says. No more than `num_bytes` + 1 are ever made.
        """
        inflate = zlib.decompressobj()
        try:
            content = inflate.decompress(b64decode(self.data, validate=True), self.num_bytes + 1)
        except (binascii.Error, zlib.error) as error:
            raise ValueError("the array cannot be unpacked") from error
        if len(content) != self.num_bytes:
            raise ValueError(f"the array has not {self.num_bytes} bytes")
        return content


class Batching(StrEnum):
    """Ways in which a model combines a field's values of several items."""

    BATCHED = "batched"  # stacked
    FLAT = "flat"  # concatenated along `dim`
    SHARED = "shared"  # one value for all


class RecordField(_Part):
    """A value of the item that the language model reads."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
    batching: Batching
    dim: int = Field(default=0, ge=-4, le=3)
    keep_on_cpu: bool = False
    value: PackedArray | float | int | bool | tuple[float | int, ...]


class PlaceholderUpdate(_Part):
    """Tokens that replace the item's placeholder in the prompt, once its size is known."""

    mode: Literal["insert", "replace"]
    target: tuple[NonNegativeInt, ...] = Field(min_length=1, max_length=MAX_TARGET_TOKENS)  # token ids
    tokens: PackedArray  # token ids, int32 [length]
    is_embed: PackedArray | None = None  # bool [length]: which of them are embeddings; None: all

    def model_post_init(self, context: Any) -> None:
        """Refuse (ValueError) tokens and a mask that do not match."""
        if self.tokens.dtype != TOKEN_DTYPE or len(self.tokens.shape) != 1:
            raise ValueError("tokens must be one row of int32")
        if self.is_embed is not None and (
            self.is_embed.dtype != "bool" or self.is_embed.shape != self.tokens.shape
        ):
            raise ValueError("is_embed must be one bool for each token")

    def num_embeds(self) -> int:
        """Return the number of rows of the encoder's output for the item.

        Raises:
            ValueError: the mask cannot be unpacked.
        """
        return self.tokens.shape[0] if self.is_embed is None else self.is_embed.unpack().count(1)


class ItemRecord(_Part):
    """Record of one media item for a language model."""

    version: Literal[1] = RECORD_VERSION
    fields: tuple[RecordField, ...] = Field(default=(), max_length=MAX_RECORD_FIELDS)
    updates: tuple[PlaceholderUpdate, ...] = Field(min_length=1, max_length=MAX_RECORD_UPDATES)
    # Rows of each piece, where the item's tensor lies in the store in several; (): in one, under the mm_hash.
    pieces: tuple[PositiveInt, ...] = Field(default=(), max_length=MAX_PIECES)
