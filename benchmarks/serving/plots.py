"""SVG plots: latency over load, distribution of gaps, timeline. Pure."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from handover_ways.svg import COLORS, log_log_plot

from serving.load_points import LoadPoint

Results = Sequence[tuple[LoadPoint, Mapping[str, Any]]]
LINES = (
    ("TTFT p50", "median_ttft_ms"), ("TTFT p99", "p99_ttft_ms"), ("TPOT p50", "median_tpot_ms"),
    ("ITL p99", "p99_itl_ms"),
)  # fmt: skip
ROW_HEIGHT = 14
TIMELINE_WIDTH, TIMELINE_LEFT, TIMELINE_TOP = 1000, 60, 50
LONG_GAP_MS = 100.0


def latency_over_load(results: Results, axis: str) -> str:
    """Plot with one line per figure; empty if fewer than two points of one loop were measured."""
    lines = {
        name: [
            (point.value, float(figures[key]))
            for point, figures in sorted(results, key=lambda each: each[0].value)
            if figures.get(key)
        ]
        for name, key in LINES
    }
    lines = {name: points for name, points in lines.items() if len(points) > 1}
    return log_log_plot("Latency over load", axis, "ms", lines) if lines else ""


def gap_distribution(results: Results) -> str:
    """Plot of the share of token gaps longer than a time, for each load point."""
    lines = {}
    for point, figures in results:
        gaps = sorted(gap * 1e3 for found in figures.get("itls", ()) for gap in found if gap > 0)
        if len(gaps) > 1:
            step = max(1, len(gaps) // 400)  # all of the tail, a part of the rest
            places = sorted({*range(0, len(gaps), step), *range(max(0, len(gaps) - 100), len(gaps))})
            lines[point.title] = [(gaps[place], 1 - place / len(gaps)) for place in places]
    if not lines:
        return ""
    return log_log_plot("Gaps between tokens", "ms", "share of gaps that are longer", lines)


def timeline(figures: Mapping[str, Any], title: str) -> str:
    """Plot with a row per request: wait for the first token, streaming, marked long gaps."""
    requests = sorted(
        (start, ttft, itls)
        for start, ttft, itls in zip(
            figures.get("start_times", ()), figures.get("ttfts", ()), figures.get("itls", ()), strict=True
        )
    )
    if not requests:
        return ""
    first = requests[0][0]
    last = max(start + ttft + sum(itls) for start, ttft, itls in requests)
    scale = (TIMELINE_WIDTH - TIMELINE_LEFT - 20) / max(last - first, 1e-9)
    height = TIMELINE_TOP + ROW_HEIGHT * len(requests) + 20
    legend = (
        f"{last - first:.1f} s; grey: until the first token; blue: streaming; "
        f"red: a gap of more than {LONG_GAP_MS:g} ms"
    )
    size = f'viewBox="0 0 {TIMELINE_WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">',
        f'<rect width="{TIMELINE_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{TIMELINE_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        f'<text x="{TIMELINE_LEFT}" y="38" font-size="12">{legend}</text>',
    ]
    for row, (start, ttft, itls) in enumerate(requests):
        y = TIMELINE_TOP + ROW_HEIGHT * row
        at = start - first
        parts.append(_bar(at, ttft, scale, y, COLORS[1]))
        at += ttft
        parts.append(_bar(at, sum(itls), scale, y, COLORS[0]))
        for gap in itls:
            if gap * 1e3 > LONG_GAP_MS:
                parts.append(_bar(at, gap, scale, y, COLORS[2]))
            at += gap
    return "\n".join([*parts, "</svg>", ""])


def _bar(at_s: float, seconds: float, scale: float, y: float, color: str) -> str:
    return (
        f'<rect x="{TIMELINE_LEFT + at_s * scale:.1f}" y="{y}" width="{max(seconds * scale, 0.5):.1f}" '
        f'height="{ROW_HEIGHT - 3}" fill="{color}"/>'
    )
