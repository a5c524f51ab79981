"""Times of encode and prefill on this machine, and how much of them overlap can hide. Pure.

The serial arm runs one after the other and reports when the last image was encoded, so each request gives
both. The cost of one image is the difference of eight (or four) and one, without what is paid once per
request.
"""

from dataclasses import asdict, dataclass

from load.figures import median
from load.intervals import Interval, median_interval

from comparison.measuring import Measured


@dataclass(frozen=True)
class StageTimes:
    """Stage times in ms on the serial arm; NaN where the workload was not measured."""

    encode_one: float  # a request's only image: HTTP, preprocessing, encoder
    encode_each: float  # what each further image adds
    prefill_one: float  # from there to the first token
    prefill_each: float  # what each further image adds
    prefill_text: float  # what 1,000 tokens of text before the image add

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def stage_times(measured: Measured) -> StageTimes:
    def encode(workload: str) -> float:
        return median(measured.of(workload, "serial", "image.encode_ms"))

    def prefill(workload: str) -> float:
        return median(measured.of(workload, "serial", "image.after_encode_ms"))

    several, further = ("eight_images", 7) if "eight_images" in measured.figures else ("four_images", 3)
    return StageTimes(
        encode_one=encode("one_image"),
        encode_each=(encode(several) - encode("one_image")) / further,
        prefill_one=prefill("one_image"),
        prefill_each=(prefill(several) - prefill("one_image")) / further,
        prefill_text=prefill("text_then_image") - prefill("one_image"),
    )


def hidable_ms(workload: str, times: StageTimes) -> float:
    """Time that a perfect overlap hides: (n − 1) times the shorter stage, or the shorter of encode and text.

    NaN if nothing can be hidden, or it is not known.
    """
    further = {"four_images": 3, "eight_images": 7}
    if workload in further:
        return further[workload] * min(times.encode_each, times.prefill_each)
    if workload == "text_then_image":
        return min(times.encode_one, times.prefill_text)
    return float("nan")


def hidden_share(measured: Measured, workload: str, arm: str) -> Interval:
    """Hidden time ÷ time that could be hidden, over pairs of repeats."""
    hidable = hidable_ms(workload, stage_times(measured))
    figure = "image.ttft_ms"
    serial, ours = measured.of(workload, "serial", figure), measured.of(workload, arm, figure)
    shares = [(base - value) / hidable for base, value in zip(serial, ours, strict=True)]
    return median_interval(shares, measured.num_starts)
