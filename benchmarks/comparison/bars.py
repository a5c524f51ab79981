"""Bars of the comparison, written down before the run, and verdicts on a run.

Ratios are of paired repeats; their median counts. The limits of overlap at scale `m` are about nine tenths of
what can be hidden there; other scales are held to the share of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from load.figures import Objectives
from load.intervals import Interval, ratio_interval

from comparison.measuring import Measured
from comparison.model_shapes import SCALES, Scale
from comparison.stages import hidden_share

EVERY_SCALE = tuple(SCALES)
OVERLAP_SCALES = ("s", "m", "l", "3b")  # where both stages take long enough for one to hide behind the other
SMALLEST_HIDDEN_SHARE = 0.8


@dataclass(frozen=True)
class Bar:
    """`arm` ÷ the better of `bases`, of one figure.

    With `is_hidden_share`: hidden time ÷ time that could be hidden.
    """

    arm: str
    bases: tuple[str, ...]
    workload: str
    figure: str
    limit: float
    is_at_most: bool = True
    scales: tuple[str, ...] = ("m",)
    is_hidden_share: bool = False

    @property
    def title(self) -> str:
        if self.is_hidden_share:
            return f"{self.workload}: hidden ÷ hidable, {self.arm} against {self.bases[0]}"
        base = self.bases[0] if len(self.bases) == 1 else f"the better of {' and '.join(self.bases)}"
        return f"{self.workload}: {self.figure}, {self.arm} ÷ {base}"

    @property
    def demand(self) -> str:
        return f"{'≤' if self.is_at_most else '≥'} {self.limit:g}"

    def missed_by(self, got: Interval) -> float:
        """Amount by which the figure misses the bar; not above 0 if it holds."""
        return got.middle - self.limit if self.is_at_most else self.limit - got.middle


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
    base: str = ""  # the better one of the bar's bases, which counts; empty: not measured

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "title": self.bar.title, "outcome": self.outcome.value}


def _at_most(
    arm: str, base: str, workload: str, figure: str, limit: float, scales: tuple[str, ...] = ("m",)
) -> Bar:
    return Bar(arm, (base,), workload, figure, limit, True, scales)


def _at_least(arm: str, base: str, workload: str, figure: str, limit: float) -> Bar:
    return Bar(arm, (base,), workload, figure, limit, False)


def _no_worse(workload: str, figure: str, limit: float, *, is_at_most: bool = True) -> Bar:
    """Bar for the encode decision, beside the same answer for all requests."""
    return Bar("helping", ("always_remote", "always_local"), workload, figure, limit, is_at_most, EVERY_SCALE)


TTFT = "image.ttft_ms"
_OVERLAPPING = ("four_images", "eight_images", "text_then_image")
BARS: tuple[Bar, ...] = (
    # Against encode first, then prefill: an encoder on one core, prefill_decode on the other.
    _at_most("triptych", "serial", "four_images", TTFT, 0.73),
    _at_most("triptych", "serial", "eight_images", TTFT, 0.64),
    _at_most("triptych", "serial", "text_then_image", TTFT, 0.83),
    _at_most("triptych", "serial", "one_image", TTFT, 0.97),
    *(
        _at_most("triptych", "serial", workload, TTFT, 1.0, OVERLAP_SCALES)
        for workload in ("one_image", "image_then_text", *_OVERLAPPING)
    ),
    *(
        Bar(
            "triptych", ("serial",), workload, TTFT, SMALLEST_HIDDEN_SHARE, is_at_most=False,
            scales=OVERLAP_SCALES, is_hidden_share=True,
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
    # Who encodes, decided per request: never more than 3 % worse than the better of the two answers.
    _no_worse("text_only", "text.ttft_ms", 1.03),
    *(
        _no_worse(workload, TTFT, 1.03)
        for workload in ("one_image", "two_images", "four_images", "eight_images", "sixteen_images")
    ),
    *(
        _no_worse(workload, "all.requests_per_s", 0.97, is_at_most=False)
        for workload in ("saturation_images", "saturation_mixed")
    ),
)  # fmt: skip

FIRST_TOKEN_STAGES = 8.0
STALL_STAGES = 0.5


def objectives(scale: Scale) -> Objectives:
    """Objectives from the shape of the scale, not from what a run measures.

    The first token comes within eight times one image's encode and prefill; no stall exceeds half of that
    sum.
    """
    both = scale.encode_ms + scale.prefill_ms
    return Objectives(ttft_ms=FIRST_TOKEN_STAGES * both, stall_ms=STALL_STAGES * both)


def verdicts(measured: Measured, scale: str, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Verdicts on every bar of this scale, in order."""
    return [_verdict(measured, bar) for bar in bars if scale in bar.scales]


def _verdict(measured: Measured, bar: Bar) -> Verdict:
    by_arm: Mapping[str, object] = measured.figures.get(bar.workload, {})
    got = {base: _got(measured, bar, base) for base in bar.bases if {bar.arm, base} <= by_arm.keys()}
    if len(got) < len(bar.bases) or not all(each.num_pairs for each in got.values()):
        return Verdict(bar, ratio_interval([], []), Outcome.NOT_MEASURED)
    base = max(got, key=lambda name: bar.missed_by(got[name]))  # beside the better one an arm looks worse
    over = bar.missed_by(got[base])
    if over > 0:
        return Verdict(bar, got[base], Outcome.MISSED, over, base)
    return Verdict(bar, got[base], Outcome.HELD, base=base)


def _got(measured: Measured, bar: Bar, base: str) -> Interval:
    if bar.is_hidden_share:
        return hidden_share(measured, bar.workload, bar.arm)
    return measured.ratio(bar.workload, bar.arm, base, bar.figure)
