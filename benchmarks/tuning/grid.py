"""The set-ups that are tried, and which of them are tried again. Pure.

All combinations are measured for a short time; the better half of them again, for twice as long, and so on
until one is left: successive halving (Jamieson and Talwalkar, Best Arm Identification, 2016). A set-up
that is clearly worse costs one short measurement.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

ENCODERS = "encoders"
DEFAULT_AXES: Mapping[str, tuple[str, ...]] = {
    ENCODERS: ("1", "2"),
    "TRIPTYCH_NUM_SLOTS": ("2", "8"),  # jobs in hand
    "TRIPTYCH_ENCODE_BATCH": ("1", "4"),  # items that are encoded at once
    "TRIPTYCH_PREALLOCATION": ("sync", "async"),
}
KEPT_SHARE = 0.5


class AxisFormatError(ValueError):
    """An axis is not `NAME=VALUE,VALUE`."""


@dataclass(frozen=True)
class Setup:
    """One combination: an encoder count, and settings of Triptych."""

    num_encoders: int
    env: tuple[tuple[str, str], ...]

    @property
    def title(self) -> str:
        parts = [f"{name.removeprefix('TRIPTYCH_').lower()} {value}" for name, value in self.env]
        return ", ".join([f"{self.num_encoders} encoder{'s' if self.num_encoders > 1 else ''}", *parts])


def parse_axes(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`NAME=VALUE,VALUE` each; a name is `encoders` or a setting's variable. None given: the default axes.

    Raises:
        AxisFormatError: one is not of this form.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        found = tuple(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
        if not found or not (name == ENCODERS or name.startswith("TRIPTYCH_")):
            raise AxisFormatError(f"{text}: expected encoders=1,2 or TRIPTYCH_SETTING=VALUE,VALUE")
        if name == ENCODERS and not all(value.isdecimal() and int(value) > 0 for value in found):
            raise AxisFormatError(f"{text}: encoders are counted from 1 on")
        axes[name] = found
    return axes or dict(DEFAULT_AXES)


def setups(axes: Mapping[str, Sequence[str]]) -> list[Setup]:
    """All combinations of the axes' values."""
    names = [name for name in axes if name != ENCODERS]
    counts = [int(count) for count in axes.get(ENCODERS, ("1",))]
    return [
        Setup(count, tuple(zip(names, values, strict=True)))
        for count in counts
        for values in product(*(axes[name] for name in names))
    ]


def survivors(goodput: Mapping[Setup, float]) -> list[Setup]:
    """The better half, best first; at least one. A set-up that failed has NaN, and goes."""
    ranked = sorted(
        (setup for setup, value in goodput.items() if not math.isnan(value)),
        key=lambda setup: -goodput[setup],
    )
    return ranked[: max(1, math.floor(len(ranked) * KEPT_SHARE))]
