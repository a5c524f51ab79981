"""Small plots as SVG text: lines over logarithmic axes."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 820, 480, 70, 130, 40, 50
COLORS = ("#4c78a8", "#9d9d9d", "#d62728", "#54a24b", "#f2a541", "#8c564b", "#b279a2", "#17becf")
Points = Sequence[tuple[float, float]]


def log_log_plot(title: str, x_label: str, y_label: str, lines: Mapping[str, Points]) -> str:
    """Plot of lines whose values are all above 0."""
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x_axis, y_axis = _Axis(xs, 2, LEFT, WIDTH - RIGHT), _Axis(ys, 10, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(WIDTH / 2, 22, title, "middle", size=15),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label, "middle"),
        f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, y_label, "middle")}</g>',
    ]
    for value in x_axis.ticks():
        x = x_axis.at(value)
        parts.append(_line(x, TOP, x, HEIGHT - BOTTOM))
        parts.append(_text(x, HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
    for value in y_axis.ticks():
        y = y_axis.at(value)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y))
        parts.append(_text(LEFT - 6, y + 4, f"{value:g}", "end"))
    for number, (name, points) in enumerate(lines.items()):
        color = COLORS[number % len(COLORS)]
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend_y = TOP + 14 + 20 * number
        parts.append(_line(WIDTH - RIGHT + 12, legend_y, WIDTH - RIGHT + 34, legend_y, color, 3))
        parts.append(_text(WIDTH - RIGHT + 40, legend_y + 4, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """Maps values to positions, in powers of `base`."""

    def __init__(self, values: Sequence[float], base: int, first: float, last: float) -> None:
        self._base = base
        self._low = math.floor(round(math.log(min(values), base), 6))
        self._high = max(self._low + 1, math.ceil(round(math.log(max(values), base), 6)))
        self._first, self._last = first, last

    def at(self, value: float) -> float:
        part = (math.log(value, self._base) - self._low) / (self._high - self._low)
        return self._first + part * (self._last - self._first)

    def ticks(self) -> list[float]:
        step = max(1, (self._high - self._low) // 8)
        return [float(self._base) ** power for power in range(self._low, self._high + 1, step)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str = "#dddddd", width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}"/>'
    )


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'
