"""The table of `tune`, as Markdown. Pure."""

from collections.abc import Mapping, Sequence

from comparison.report import number, table
from load.figures import median

from tuning.grid import Setup

COLUMNS = (
    ("good/s", "all.goodput_per_s"), ("requests/s", "all.requests_per_s"), ("TTFT p50", "image.ttft_ms"),
    ("TTFT p99", "image.ttft_p99_ms"), ("text tokens/s", "text.tokens_per_s"),
    ("ITL p99", "text.itl_p99_ms"), ("stall", "text.stall_ms"),
)  # fmt: skip


def setups_table(found: Mapping[Setup, Sequence[Mapping[str, float]]]) -> str:
    """Best first among those measured longest; `found`: figures of each set-up's repeats. Times in ms."""

    def rank(setup: Setup) -> tuple[int, float]:
        return -len(found[setup]), -median(each["all.goodput_per_s"] for each in found[setup])

    rows = [
        [
            setup.title,
            str(len(found[setup])),
            *(number(median(each.get(key, float("nan")) for each in found[setup])) for _, key in COLUMNS),
        ]
        for setup in sorted(found, key=rank)
    ]
    return table(["set-up", "repeats", *(title for title, _ in COLUMNS)], rows)
