"""Number of engines of each role in a system. Pure.

    e+pd: encode ──▶ prefill-decode              ep+d: encode-prefill ──▶ decode
    e+p+d: encode ──▶ prefill ──▶ decode         epd: encode-prefill-decode

These are the simplest; a system may have engines of all roles.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from triptych_common.protocol.messages import Role

TopologyName = Literal["e+pd", "e+p+d", "ep+d", "epd"]


class Bounds(NamedTuple):
    """Fewest and most instances of a stage; equal: it is not scaled."""

    low: int
    high: int

    def clamp(self, number: int) -> int:
        return min(max(number, self.low), self.high)

    @property
    def is_range(self) -> bool:
        return self.low < self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}" if self.is_range else str(self.low)

    @classmethod
    def parse(cls, text: str) -> "Bounds":
        """Parse `2` or `0..3`. Raises ValueError: it is neither."""
        low, dots, high = text.partition("..")
        if not low.isascii() or not low.isdigit() or (dots and not (high.isascii() and high.isdigit())):
            raise ValueError(f"{text!r} is neither a number nor a range such as 0..3")
        bounds = cls(int(low), int(high or low))
        if bounds.low > bounds.high:
            raise ValueError(f"{text!r} begins above its end")
        return bounds


@dataclass(frozen=True)
class RoleCounts:
    encoders: int = 0
    prefill_decodes: int = 0
    prefills: int = 0
    decodes: int = 0
    encode_prefills: int = 0
    encode_prefill_decodes: int = 0

    def language_models(self) -> list[tuple[Role, int]]:
        """Role of each engine, with the engine's number among those of its role."""
        counts = {
            Role.PREFILL_DECODE: self.prefill_decodes,
            Role.PREFILL: self.prefills,
            Role.ENCODE_PREFILL: self.encode_prefills,
            Role.DECODE: self.decodes,
            Role.ENCODE_PREFILL_DECODE: self.encode_prefill_decodes,
        }
        return [(role, number) for role, count in counts.items() for number in range(count)]

    @property
    def num_handing_over(self) -> int:
        """Number of engines that hand KV caches over, or take them."""
        return sum(role in HANDING_OVER for role, _ in self.language_models())

    def fault(self, *, has_tower: bool) -> str | None:
        """Reason why such a system could not answer requests; `has_tower`: prefill_decodes can encode."""
        num_prefilling = self.prefills + self.encode_prefills
        if not num_prefilling and not self.decodes and not self.prefill_decodes + self.encode_prefill_decodes:
            return "nothing would answer: add --prefill-decodes 1"
        if num_prefilling and not self.decodes:
            return "nothing would decode what is prefilled: add --decodes 1"
        if self.decodes and not num_prefilling:
            return "nothing would prefill for the instances that decode: add --prefills 1"
        encodes = self.encoders or self.encode_prefills or self.encode_prefill_decodes
        if not encodes and not (self.prefill_decodes and has_tower):
            return "without encoders no image can be served: add --local-encode fallback, or auto"
        return None


HANDING_OVER = frozenset({Role.PREFILL, Role.ENCODE_PREFILL, Role.DECODE})
"""Roles that hand KV caches over, or take them."""
TAKING_TENSORS = frozenset({Role.PREFILL_DECODE, Role.PREFILL})
"""Roles that take tensors from encoders."""

TOPOLOGIES: Mapping[TopologyName, RoleCounts] = {
    "e+pd": RoleCounts(encoders=1, prefill_decodes=1),
    "e+p+d": RoleCounts(encoders=1, prefills=1, decodes=1),
    "ep+d": RoleCounts(encode_prefills=1, decodes=1),
    "epd": RoleCounts(encode_prefill_decodes=1),
}


def instance_name(role: str, number: int, host: str | None = None) -> str:
    """Instance name such as `prefill_decode-0`; with several hosts it contains `host`."""
    words = [stage_of(role), *([host] if host else []), str(number)]
    return "-".join(words)


def stage_of(role: str) -> str:
    """Return the first word of the names of a role's instances."""
    return role.replace("-", "_")


def is_named(instance: str, wanted: str) -> bool:
    """True if `wanted` is the instance or its kind."""
    return instance == wanted or instance.startswith(f"{wanted}-")
