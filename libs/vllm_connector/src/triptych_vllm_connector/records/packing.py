"""Converts tensors and token lists to `PackedArray`s and back."""

from collections.abc import Sequence
from typing import Any, get_args

import torch

from triptych_common.domain.errors import TriptychError
from triptych_common.protocol.item_record import TOKEN_DTYPE, ArrayDtype, PackedArray

_NAMES: dict[torch.dtype, ArrayDtype] = {getattr(torch, name): name for name in get_args(ArrayDtype)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class NotRecordableError(TriptychError):
    """The model's items have properties that no record can hold, so it cannot be served this way."""


def pack_tensor(tensor: torch.Tensor) -> PackedArray:
    """Pack a tensor; raises NotRecordableError for a dtype that no record has."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise NotRecordableError(f"a field of {tensor.dtype}")
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)  # NumPy has no bfloat16
    return PackedArray.pack(name, tuple(tensor.shape), content.numpy().tobytes())


def unpack_tensor(array: PackedArray) -> torch.Tensor:
    """Copy of the tensor; raises ValueError if the content does not fit the shape."""
    content = bytearray(array.unpack())
    if not content:
        return torch.empty(array.shape, dtype=_DTYPES[array.dtype])
    return torch.frombuffer(content, dtype=_DTYPES[array.dtype]).reshape(array.shape)


def pack_tokens(tokens: Sequence[int]) -> PackedArray:
    return pack_tensor(torch.tensor(tokens, dtype=getattr(torch, TOKEN_DTYPE)))


def unpack_tokens(array: PackedArray) -> list[int]:
    """Unpack tokens; raises ValueError if the content does not fit the shape."""
    tokens: list[int] = unpack_tensor(array).tolist()
    return tokens


def pack_value(value: Any) -> PackedArray | float | int | tuple[float | int, ...]:
    """Pack a field's value; raises NotRecordableError."""
    if isinstance(value, torch.Tensor):
        return pack_tensor(value)
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(each, (int, float)) for each in value):
        return tuple(value)
    raise NotRecordableError(f"a field of type {type(value).__name__}")


def unpack_value(value: PackedArray | float | int | tuple[float | int, ...]) -> Any:
    """Unpack a value; raises ValueError if the content does not fit the shape."""
    if isinstance(value, PackedArray):
        return unpack_tensor(value)
    return list(value) if isinstance(value, tuple) else value
