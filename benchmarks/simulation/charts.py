"""Small SVG line charts, without a library: one panel, lines with names at their ends."""

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 260, 56, 130, 28, 40
FONT = 'font-family="sans-serif" font-size="11"'
COLOURS = ("#2463a8", "#c2572b", "#3d8b4f", "#7a4fa3", "#8a8a2a")

Line = tuple[str, Sequence[tuple[float, float]]]


def line_chart(title: str, x_title: str, y_title: str, lines: Sequence[Line], *, y_max: float) -> str:
    """An SVG. Values above `y_max` end the line at the top.

    Raises:
        ValueError: there are no points.
    """
    xs = [x for _, points in lines for x, _ in points]
    if not xs:
        raise ValueError("a chart needs points")
    x_max = max(xs)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / x_max * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - min(y, y_max) / y_max * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>',
    ]
    base = HEIGHT - BOTTOM + 16
    for step in range(6):
        x, y = place(x_max * step / 5, y_max * step / 5)
        parts += [
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>',
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{y_max * step / 5:g}</text>',
            f'<text x="{x:.1f}" y="{base}" text-anchor="middle">{x_max * step / 5:.3g}</text>',
        ]
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        shown = _until_top(points, y_max)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in shown))
        end_x, end_y = place(*shown[-1])
        label_y = end_y + 4 + 12 * (number % 2)
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{end_x + 5:.1f}" y="{label_y:.1f}" fill="{colour}">{escape(name)}</text>',
        ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts += [
        f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x_title)}</text>',
        f'<text transform="translate(12 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{y_title}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _until_top(points: Sequence[tuple[float, float]], y_max: float) -> list[tuple[float, float]]:
    """Points up to and including the first above the top."""
    shown: list[tuple[float, float]] = []
    for point in points:
        shown.append(point)
        if point[1] > y_max:
            break
    return shown
