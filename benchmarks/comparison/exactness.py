"""Comparison of the arms' tokens for equal questions. Pure.

In float32 and with greedy choice they should be equal; a difference is reported with its place. Engines that
split a prompt into other steps add in another order: where two tokens are equally likely to the last bits of
a float, that alone can turn one.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass
class Exactness:
    """Tokens of one arm compared with the reference."""

    num_compared: int = 0
    num_equal: int = 0
    differing: list[str] = field(default_factory=list)  # labels, with the place of the first other token

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def compare_tokens(tokens: Mapping[str, Mapping[str, list[int]]], reference: str) -> dict[str, Exactness]:
    """Result by arm, without the reference; `tokens` are by arm, then by the question's label."""
    found: dict[str, Exactness] = {}
    for arm, by_label in tokens.items():
        if arm == reference:
            continue
        exactness = found.setdefault(arm, Exactness())
        for label, expected in tokens[reference].items():
            if label not in by_label:
                continue
            exactness.num_compared += 1
            if by_label[label] == expected:
                exactness.num_equal += 1
            else:
                exactness.differing.append(f"{label} from token {_first_other(by_label[label], expected)}")
    return found


def _first_other(got: list[int], expected: list[int]) -> int:
    pairs = zip(got, expected, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
