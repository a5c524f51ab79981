"""The plots of a report: times by size, and times of tensors that are kept, one after another."""

from typing import Any

from handover_ways.svg import HEIGHT, WIDTH, log_log_plot

Points = list[tuple[float, float]]


def plots(report: dict[str, Any]) -> str:
    """One SVG, the plots one below the other."""
    drawn = []
    by_size = recycled(report["results"])
    if by_size:
        drawn.append(
            log_log_plot(
                "Recycled: each tensor is deleted at once", "MiB", "ms until every byte is read", by_size
            )
        )
    kept: dict[str, Points] = {
        each["way"]: [(float(number), ms) for number, ms in enumerate(each["read_ms"], 1)]
        for each in report["kept"]
    }
    if kept:
        size = report["kept"][0]["size_mib"]
        title = f"Kept: tensors of {size:g} MiB stay, one after another"
        drawn.append(log_log_plot(title, "tensor", "ms until every byte is read", kept))
    placed = (
        each.replace("<svg ", f'<svg y="{HEIGHT * number}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        for number, each in enumerate(drawn)
    )
    height = HEIGHT * len(drawn)
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">', *placed, "</svg>", ""]
    )


def recycled(rows: list[dict[str, Any]]) -> dict[str, Points]:
    lines: dict[str, Points] = {}
    for each in rows:
        if each["num_pairs"] == 1 and each["regime"] == "recycled":
            value = each["copy_ms"] if each["way"].startswith("memcpy") else each["read"]["p50"]
            lines.setdefault(each["way"], []).append((each["size_mib"], value))
    return lines
