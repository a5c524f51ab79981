"""Form of the model's preprocessed items, learned from reference media. Knows no model.

The vision tower is built for one form: types, numbers of dimensions, and most dimensions are the same for
every image; others grow with the item's rows. An item of another form would raise inside the tower, so it is
refused before. A number that neither stays the same nor grows with the rows is not checked.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from triptych_common.domain.errors import TriptychError

MAX_PRODUCT_VALUES = 16  # a grid is small; others are data


class ItemMismatchError(TriptychError):
    """A preprocessed item does not have the form that the tower takes."""


@dataclass(frozen=True, slots=True)
class Part:
    kind: str  # dtype, `list`, or the name of a type
    dims: tuple[int, ...] = ()
    product: int | None = None  # of the values of a small tensor of whole numbers, e.g. a grid


Parts = Mapping[str, Sequence[Part]]  # by path; several at the path of a list's elements


@dataclass(frozen=True, slots=True)
class Sample:
    parts: Parts
    num_embeds: int


def parts_of(item: Mapping[str, Any]) -> Parts:
    """Parts of vLLM's `MultiModalKwargsItem`, by path."""
    found: dict[str, list[Part]] = {}
    for name, element in item.items():
        for path, part in _walk(name, element.data):
            found.setdefault(path, []).append(part)
    return found


def _walk(path: str, data: Any) -> Iterator[tuple[str, Part]]:
    if isinstance(data, torch.Tensor):
        yield path, Part(str(data.dtype), tuple(data.shape), _product(data))
    elif isinstance(data, (list, tuple)):
        yield path, Part("list", (len(data),))
        for each in data:
            yield from _walk(f"{path}[]", each)
    else:
        yield path, Part(type(data).__name__)


def _product(tensor: torch.Tensor) -> int | None:
    if tensor.is_floating_point() or tensor.is_complex() or not 0 < tensor.numel() <= MAX_PRODUCT_VALUES:
        return None
    values = [int(value) for value in tensor.flatten().tolist()]
    return math.prod(values) if min(values) > 0 else 0


@dataclass(frozen=True, slots=True)
class _Quantity:
    """A number that is `fixed`, or `per_row` times the item's rows, or (neither) free."""

    fixed: int | None = None
    per_row: Fraction | None = None

    @classmethod
    def learned(cls, seen: Sequence[tuple[int, int]]) -> "_Quantity":
        values = {value for value, _ in seen}
        if len(values) == 1:
            return cls(fixed=values.pop())
        ratios = {Fraction(value, rows) for value, rows in seen}
        return cls(per_row=ratios.pop()) if len(ratios) == 1 else cls()

    def fits(self, value: int, num_embeds: int) -> bool:
        if self.fixed is not None:
            return value == self.fixed
        return self.per_row is None or value == self.per_row * num_embeds


@dataclass(frozen=True, slots=True)
class _Rule:
    kinds: frozenset[str]
    dims: tuple[_Quantity, ...] | None  # None: their number varies
    product: _Quantity

    def fits(self, part: Part, num_embeds: int) -> bool:
        if part.kind not in self.kinds:
            return False
        if self.dims is not None and not (
            len(part.dims) == len(self.dims)
            and all(rule.fits(size, num_embeds) for rule, size in zip(self.dims, part.dims, strict=True))
        ):
            return False
        return part.product is None or self.product.fits(part.product, num_embeds)


class ItemSchema:
    """Form that all samples have in common."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        paths = {path for sample in samples for path in sample.parts}
        self._required = {path for path in paths if all(path in sample.parts for sample in samples)}
        self._rules = {path: _rule(path, samples) for path in paths}

    def check(self, item: Mapping[str, Any], num_embeds: int) -> None:
        """Raise ItemMismatchError, naming the first part that does not fit."""
        if num_embeds < 1:
            raise ItemMismatchError("the item has no rows")
        parts = parts_of(item)
        for path in sorted(self._required - parts.keys()):
            raise ItemMismatchError(f"{path} is missing")
        for path, found in parts.items():
            rule = self._rules.get(path)
            for part in found:
                if rule is None or not rule.fits(part, num_embeds):
                    raise ItemMismatchError(f"{path} does not fit {num_embeds} rows: {part}")


def _rule(path: str, samples: Sequence[Sample]) -> _Rule:
    seen = [(part, sample.num_embeds) for sample in samples for part in sample.parts.get(path, ())]
    numbers_of_dims = {len(part.dims) for part, _ in seen}
    dims: tuple[_Quantity, ...] | None = None
    if len(numbers_of_dims) == 1:
        dims = tuple(
            _Quantity.learned([(part.dims[index], rows) for part, rows in seen])
            for index in range(numbers_of_dims.pop())
        )
    products = [(part.product, rows) for part, rows in seen if part.product is not None]
    # A product that never changed is no rule: values of a list may be anything that the image is.
    product = _Quantity.learned(products) if len({value for value, _ in products}) > 1 else _Quantity()
    return _Rule(frozenset(part.kind for part, _ in seen), dims, product)
