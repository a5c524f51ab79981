"""Markdown tables of a comparison. Pure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from load.figures import median

from comparison.bars import Outcome, Verdict
from comparison.exactness import Exactness
from comparison.measuring import Measured
from comparison.processes import ProcessMemory
from comparison.stages import StageTimes

BAR_COLUMNS = ("bar", "demanded", "got", "outcome")
BASES = ("serial", "monolith", "always_remote", "always_local")
_ALONE = ("ttft_ms", "e2e_ms")
_LOAD = ("ttft_ms", "requests_per_s", "goodput_per_s")
_STREAMS = ("tokens_per_s", "tpot_ms", "itl_p50_ms", "itl_p99_ms", "itl_p999_ms", "stall_ms")
SHOWN: Mapping[str, Sequence[str]] = {
    "text_only": ("text.ttft_ms", "text.e2e_ms"),
    **{
        workload: tuple(f"image.{figure}" for figure in _ALONE)
        for workload in (
            "one_image", "two_images", "four_images", "eight_images", "sixteen_images", "text_then_image",
            "image_then_text",
        )
    },
    "multi_turn": ("first_turn.ttft_ms", "text_turn.ttft_ms", "image_turn.ttft_ms"),
    "known_image": ("known.ttft_ms", "known.e2e_ms"),
    "mixed": ("image.ttft_ms", "image.ttft_p99_ms", *(f"text.{figure}" for figure in _STREAMS)),
    "pausing": ("image.ttft_ms", "image.ttft_p99_ms", *(f"text.{figure}" for figure in _STREAMS)),
    "saturation_images": tuple(f"all.{figure}" for figure in _LOAD),
    "saturation_mixed": (
        *(f"all.{figure}" for figure in _LOAD),
        "image.requests_per_s", *(f"text.{figure}" for figure in _STREAMS),
    ),
}  # fmt: skip
EVERYWHERE = ("all.cpu_ms_outside_vllm",)
"""Figures that are printed; the JSON report has all."""


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned table; the first column is aligned left."""
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            f"{cell:<{width}}" if place == 0 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *rest]) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def _shown(measured: Measured) -> list[tuple[str, str]]:
    return [
        (workload, figure)
        for workload in measured.figures
        for figure in (*SHOWN.get(workload, ()), *EVERYWHERE)
    ]


def number(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def medians_table(measured: Measured, arms: Sequence[str]) -> str:
    """Table of medians over the repeats."""
    rows = [
        [
            f"{workload}: {figure}",
            *(number(median(measured.of(workload, arm, figure))) for arm in arms),
        ]
        for workload, figure in _shown(measured)
    ]
    return table(["median of repeats", *arms], rows)


def ratios_table(measured: Measured, arms: Sequence[str], base: str) -> str:
    """Table of each arm ÷ `base`: median of paired repeats with its 95 % interval."""
    others = [arm for arm in arms if arm != base]
    rows = [
        [
            f"{workload}: {figure}",
            *(str(measured.ratio(workload, arm, base, figure)) for arm in others),
        ]
        for workload, figure in _shown(measured)
    ]
    return table([f"÷ {base}", *others], rows)


def bars_table(found: Sequence[Verdict]) -> str:
    """Table of bars whose arms were measured, then the number of the others."""
    rows = []
    for verdict in found:
        if verdict.outcome is Outcome.NOT_MEASURED:
            continue
        outcome = verdict.outcome.value
        if verdict.outcome is Outcome.MISSED:
            outcome += f" by {verdict.missed_by:.2f}"
        got = str(verdict.got)
        if len(verdict.bar.bases) > 1:
            got += f" ÷ {verdict.base}"
        rows.append([verdict.bar.title, verdict.bar.demand, got, outcome])
    num_others = len(found) - len(rows)
    others = (
        f"{num_others} bars were not measured: their arms or workloads were not chosen" if num_others else ""
    )
    return "\n\n".join(part for part in (table(BAR_COLUMNS, rows) if rows else "", others) if part)


def stages_table(times: StageTimes) -> str:
    rows = [
        [name.replace("_", " "), number(value)]
        for name, value in times.as_json().items()
        if not math.isnan(value)
    ]
    return (
        table(["stage (serial arm)", "ms"], rows) if rows else "stage times: the serial arm was not measured"
    )


def memory_table(memory: Mapping[str, Sequence[ProcessMemory]]) -> str:
    """Table of the services' PSS, with a sum for each arm."""
    rows = []
    for arm, found in memory.items():
        by_service: defaultdict[str, list[ProcessMemory]] = defaultdict(list)
        for each in found:
            by_service[each.service].append(each)
        rows.append([arm, str(len(found)), number(sum(each.pss_mib for each in found)), ""])
        for service, parts in by_service.items():
            sizes = " + ".join(number(each.rss_mib) for each in parts)
            rows.append([f"  {service}", str(len(parts)), number(sum(e.pss_mib for e in parts)), sizes])
    return table(["memory, MiB", "processes", "PSS", "RSS of each"], rows)


def exactness_lines(found: Mapping[str, Exactness], reference: str) -> str:
    lines = []
    for arm, each in found.items():
        lines.append(f"{arm}: {each.num_equal} of {each.num_compared} answers token for token {reference}'s")
        lines += [f"  differs: {label}" for label in each.differing[:10]]
    return "\n".join(lines)
