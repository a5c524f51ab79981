"""A trace as a waterfall of text: one line per span, indented below its parent."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from triptych_common.telemetry.span_records import STAGE_PREFIX, STAGE_SUFFIX, SpanRecord

_NAME_SHARE = 0.34
_INSTANCE_WIDTH = 18
_NUMBERS_WIDTH = 20  # two numbers of 9 characters, two spaces
_MIN_BAR_WIDTH = 10


def render_waterfall(spans: Sequence[SpanRecord], width: int = 100) -> str:
    """Return lines of at most `width` characters: name, instance, bar, start offset and duration in ms.

    Children stand below their parent by start time; a span whose parent is missing stands at the
    left. A failed span is marked with `!`. Empty text for no spans.
    """
    if not spans:
        return ""
    first_ns = min(span.start_ns for span in spans)
    total_ns = max(1, max(span.end_ns for span in spans) - first_ns)
    name_width = max(16, int(width * _NAME_SHARE))
    bar_width = max(_MIN_BAR_WIDTH, width - name_width - _INSTANCE_WIDTH - _NUMBERS_WIDTH - 3)
    columns = (f"{'span':{name_width}}", f"{'instance':{_INSTANCE_WIDTH}}", " " * bar_width)
    lines = [" ".join((*columns, f"{'start ms':>9}", f"{'took ms':>9}"))]
    for depth, span in _depth_first(spans):
        name = "  " * depth + ("! " if span.status == "error" else "") + span.name
        bar = _bar(span.start_ns - first_ns, span.end_ns - first_ns, total_ns, bar_width)
        offset_ms = (span.start_ns - first_ns) / 1e6
        lines.append(
            f"{_fit(name, name_width)} {_fit(span.instance or span.service, _INSTANCE_WIDTH)} {bar}"
            f" {offset_ms:9.1f} {span.duration_ms:9.1f}"
        )
    return "\n".join(lines)


def first_token_stages(spans: Sequence[SpanRecord]) -> str:
    """Return `until the first token, ms: body 1.0, prefill 9.5`; empty without these spans."""
    root = next((span for span in spans if span.is_root), None)
    if root is None:
        return ""
    stages = [
        f"{name.removeprefix(STAGE_PREFIX).removesuffix(STAGE_SUFFIX)} {ms:.1f}"
        for name, ms in root.attributes.items()
        if name.startswith(STAGE_PREFIX) and isinstance(ms, (int, float))
    ]
    return f"until the first token, ms: {', '.join(stages)}" if stages else ""


def _depth_first(spans: Sequence[SpanRecord]) -> Iterator[tuple[int, SpanRecord]]:
    known = {span.span_id for span in spans}
    children: defaultdict[str | None, list[SpanRecord]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: (each.start_ns, -each.end_ns)):
        children[span.parent_id if span.parent_id in known else None].append(span)
    stack = [(0, span) for span in reversed(children[None])]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(children[span.span_id])]


def _bar(start_ns: int, end_ns: int, total_ns: int, width: int) -> str:
    """Draw a bar with at least one mark, so that a span of no length is visible."""
    first = min(width - 1, start_ns * width // total_ns)
    last = min(width, max(first + 1, -(-end_ns * width // total_ns)))
    return "·" * first + "█" * (last - first) + "·" * (width - last)


def _fit(text: str, width: int) -> str:
    return f"{text if len(text) <= width else text[: width - 1] + '…':{width}}"
