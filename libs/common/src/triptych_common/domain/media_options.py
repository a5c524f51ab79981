"""Processor and media options that a request may carry, and their bounds. Pure.

By default none: an option changes an image's cost, and the vision tower's input. An operator lists
the options that callers may set; everything else is refused before any media are read, at the gateway and
again at the encoder.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictFloat, StrictInt

Number = StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)]
MAX_NAME_CHARS = 50  # of a caller's option, as errors repeat it


class OptionBounds(BaseModel):
    """The values that one option may have: `min` to `max`, or one of `values`.

    With whole numbers as bounds only whole numbers are taken.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: Number | None = None
    max: Number | None = None
    values: tuple[JsonValue, ...] | None = None

    def model_post_init(self, context: Any) -> None:
        """Refuse (ValueError) bounds that are neither an interval nor a list."""
        if self.values is not None:
            if self.min is not None or self.max is not None or not self.values:
                raise ValueError("give `values`, at least one, or `min` and `max`")
        elif self.min is None or self.max is None:
            raise ValueError(
                "give `min` and `max`, or `values`: an option without an upper bound is not safe"
            )
        elif self.min > self.max:
            raise ValueError("`min` is above `max`")

    def allows(self, value: Any) -> bool:
        if self.values is not None:
            return any(_same(value, allowed) for allowed in self.values)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and (
            not math.isfinite(value) or (isinstance(self.min, int) and isinstance(self.max, int))
        ):
            return False
        return self.min <= value <= self.max if self.min is not None and self.max is not None else False

    @property
    def largest(self) -> float:
        """Return the largest allowed number; 0 if none is."""
        if self.values is None:
            return self.max or 0
        return max((value for value in self.values if isinstance(value, (int, float))), default=0)

    def __str__(self) -> str:
        if self.values is not None:
            return "one of " + ", ".join(orjson.dumps(value).decode() for value in self.values)
        return f"a number from {self.min} to {self.max}"


OptionRules = Mapping[str, OptionBounds]  # by the option's name


@dataclass(frozen=True, slots=True)
class OptionRefusal:
    """Name of a refused option, and the reason."""

    name: str
    reason: str


def refused_option(options: Mapping[str, Any], rules: OptionRules) -> OptionRefusal | None:
    """Return the first of `options` that `rules` refuse, or None.

    An option `min_x` must not be above its `max_x`.
    """
    for name, value in options.items():
        shown = name[:MAX_NAME_CHARS]
        bounds = rules.get(name)
        if bounds is None:
            return OptionRefusal(shown, "is not an option that requests may set here")
        if not bounds.allows(value):
            return OptionRefusal(shown, f"must be {bounds}")
    for name, value in options.items():
        upper = options.get(f"max_{name.removeprefix('min_')}") if name.startswith("min_") else None
        if isinstance(upper, (int, float)) and isinstance(value, (int, float)) and value > upper:
            return OptionRefusal(name, f"must not be above max_{name.removeprefix('min_')}")
    return None


def _same(value: Any, allowed: Any) -> bool:
    """Compare as JSON: 1 equals neither true nor 1.0."""
    try:
        return orjson.dumps(value) == orjson.dumps(allowed)
    except TypeError:  # nested more deeply than JSON is written
        return False
