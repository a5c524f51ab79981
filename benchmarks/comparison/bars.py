"""What is to be shown, written down before the run. Data, and whether a run has shown it.

Ratios are of paired repeats, their middle counts. The limits of overlap at scale `m` are about nine tenths of
what can be hidden there; other scales are held to the share of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from load.figures import Objectives
from load.intervals import Interval, ratio_interval

from comparison.measuring import Measured
from comparison.model_shapes import Scale
from comparison.stages import hidden_share

EVERY_SCALE = ("s", "m", "l", "3b")
SMALLEST_HIDDEN_SHARE = 0.8


@dataclass(frozen=True)
class Bar:
    """`arm` ÷ `base` of one figure; with `is_hidden_share`, hidden time ÷ time that could be hidden."""

    arm: str
    base: str
    workload: str
    figure: str
    limit: float
    is_at_most: bool = True
    scales: tuple[str, ...] = ("m",)
    is_hidden_share: bool = False

    @property
    def title(self) -> str:
        if self.is_hidden_share:
            return f"{self.workload}: hidden ÷ hidable, {self.arm} against {self.base}"
        return f"{self.workload}: {self.figure}, {self.arm} ÷ {self.base}"

    @property
    def demand(self) -> str:
        return f"{'≤' if self.is_at_most else '≥'} {self.limit:g}"


class Outcome(StrEnum):
    HELD = "held"
    MISSED = "missed"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Verdict:
    bar: Bar
    got: Interval
    outcome: Outcome
    missed_by: float = 0.0

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "title": self.bar.title, "outcome": self.outcome.value}


def _at_most(
    arm: str, base: str, workload: str, figure: str, limit: float, scales: tuple[str, ...] = ("m",)
) -> Bar:
    return Bar(arm, base, workload, figure, limit, True, scales)


def _at_least(arm: str, base: str, workload: str, figure: str, limit: float) -> Bar:
    return Bar(arm, base, workload, figure, limit, False)


TTFT = "image.ttft_ms"
_OVERLAPPING = ("four_images", "eight_images", "text_then_image")
BARS: tuple[Bar, ...] = (
    # Against encode first, then prefill: an encoder on one core, prefill_decode on the other.
    _at_most("triptych", "serial", "four_images", TTFT, 0.73),
    _at_most("triptych", "serial", "eight_images", TTFT, 0.64),
    _at_most("triptych", "serial", "text_then_image", TTFT, 0.83),
    _at_most("triptych", "serial", "one_image", TTFT, 0.97),
    *(
        _at_most("triptych", "serial", workload, TTFT, 1.0, EVERY_SCALE)
        for workload in ("one_image", "image_then_text", *_OVERLAPPING)
    ),
    *(
        Bar(
            "triptych", "serial", workload, TTFT, SMALLEST_HIDDEN_SHARE, is_at_most=False,
            scales=EVERY_SCALE, is_hidden_share=True,
        )
        for workload in _OVERLAPPING
    ),
    _at_most("triptych", "serial", "known_image", "known.ttft_ms", 0.75),
    # A second encoder. Where prefill takes as long as encoding, 0.75 is all that it can bring.
    _at_most("two_encoders", "no_overlap", "four_images", TTFT, 0.6, ("m", "t")),
    # Against one engine on equal cores, nothing else running.
    _at_most("text_first", "monolith", "one_image", TTFT, 1.2),
    _at_most("text_first", "monolith", "four_images", TTFT, 1.05),
    # Text streams without pause beside images: all cores are busy.
    _at_most("text_first", "monolith", "mixed", "text.itl_p999_ms", 0.2),
    _at_most("text_first", "monolith", "mixed", "text.stall_ms", 0.2),
    _at_least("text_first", "monolith", "mixed", "text.tokens_per_s", 1.2),
    _at_most("text_first", "monolith", "mixed", TTFT, 1.6),
    _at_most("image_first", "monolith", "mixed", TTFT, 1.15),
    _at_least("image_first", "monolith", "mixed", "text.tokens_per_s", 1.0),
    _at_most("image_first", "monolith", "mixed", "text.itl_p999_ms", 0.6),
    # One stream that pauses.
    _at_most("text_first", "monolith", "pausing", TTFT, 1.25),
    _at_most("text_first", "monolith", "pausing", "text.itl_p999_ms", 0.2),
    # Saturation.
    _at_least("helping", "monolith", "saturation_images", "all.requests_per_s", 0.95),
    _at_least("helping", "monolith", "saturation_mixed", "all.requests_per_s", 0.95),
    _at_least("helping", "monolith", "saturation_images", "all.goodput_per_s", 1.3),
    _at_least("helping", "monolith", "saturation_mixed", "all.goodput_per_s", 1.3),
)  # fmt: skip

FIRST_TOKEN_STAGES = 8.0
STALL_STAGES = 0.5


def objectives(scale: Scale) -> Objectives:
    """What a good request keeps, from what the scale's shape was chosen for and not from what a run measures:
    its first token within eight times one image's encode and prefill, no stall above half of that sum.
    """
    both = scale.encode_ms + scale.prefill_ms
    return Objectives(ttft_ms=FIRST_TOKEN_STAGES * both, stall_ms=STALL_STAGES * both)


def verdicts(measured: Measured, scale: str, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Of every bar of this scale, in their order."""
    return [_verdict(measured, bar) for bar in bars if scale in bar.scales]


def _verdict(measured: Measured, bar: Bar) -> Verdict:
    by_arm: Mapping[str, object] = measured.figures.get(bar.workload, {})
    if bar.arm not in by_arm or bar.base not in by_arm:
        return Verdict(bar, ratio_interval([], []), Outcome.NOT_MEASURED)
    if bar.is_hidden_share:
        got = hidden_share(measured, bar.workload, bar.arm)
    else:
        got = measured.ratio(bar.workload, bar.arm, bar.base, bar.figure)
    if not got.num_pairs:
        return Verdict(bar, got, Outcome.NOT_MEASURED)
    over = got.middle - bar.limit if bar.is_at_most else bar.limit - got.middle
    return Verdict(bar, got, Outcome.MISSED, over) if over > 0 else Verdict(bar, got, Outcome.HELD)
