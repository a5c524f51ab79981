"""`store stats | verify | ls | evict`: requests to the running cache_store."""

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from triptych_cli.commands.clients import expect, list_entries, run, store_session
from triptych_cli.console import fail, format_bytes, out, plain_table
from triptych_common.protocol.store import Done, Evict, MetricsQuery, StoreMetrics, Verified, Verify

VERIFY_TIMEOUT_S = 600.0


def stats() -> int:

    async def work() -> int:
        async with store_session() as session:
            reply = expect(StoreMetrics, await session.request(MetricsQuery(seq=0)))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for title, value in metric_rows(reply.text):
            table.add_row(title, value)
        out.print(table)
        return 0

    return run(work)


def metric_rows(text: str) -> list[tuple[str, str]]:
    """Name and value of each metric in Prometheus' text format; number and quantiles of histograms."""
    rows: list[tuple[str, str]] = []
    for family in text_string_to_metric_families(text):
        title = family.name.removeprefix("triptych_store_").replace("_", " ")
        if family.type == "histogram":
            rows += histogram_rows(title.removesuffix(" seconds"), family)
            continue
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                labels = " ".join(sample.labels.values())
                rows.append((f"{title} {labels}".strip(), format_value(family.name, sample.value)))
    return rows


def histogram_rows(title: str, family: Metric) -> list[tuple[str, str]]:
    """Number of values, and the bounds that half and 99 % of them do not exceed."""
    buckets = [
        (sample.labels["le"], sample.value) for sample in family.samples if sample.name.endswith("_bucket")
    ]
    total = buckets[-1][1]
    rows = [(title, f"{total:.0f}")]
    for part in (0.5, 0.99) if total else ():
        bound = next(bound for bound, count in buckets if count >= part * total)
        above = "more" if bound == "+Inf" else f"≤ {float(bound) * 1000:g} ms"
        rows.append((f"{title}, {part:.0%} of them", above))
    return rows


def format_value(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:.0f} s" if name.endswith("_seconds") else f"{value:.0f}"


def verify(evict: bool) -> int:
    """Check every sealed entry; 1 if one is damaged."""

    async def work() -> int:
        command = Verify(seq=0, evict=evict)
        async with store_session() as session:
            reply = expect(Verified, await session.request(command, timeout_s=VERIFY_TIMEOUT_S))
        out.print(
            f"{reply.num_intact} intact, {reply.num_recorded} checksums taken now, {reply.num_gone} evicted "
            f"meanwhile, {reply.num_damaged} damaged; "
            f"{format_bytes(reply.num_bytes)} in {reply.elapsed_s:.2f} s"
        )
        for fault in reply.damaged:
            pinned = f", held by {fault.num_pins} pins" if fault.num_pins else ""
            out.print(f"damaged: {fault.mm_hash} ({fault.fault}{pinned})")
        return 1 if reply.num_damaged else 0

    return run(work)


def ls(limit: int) -> int:
    """Print one row per entry of the store."""

    async def work() -> int:
        async with store_session() as session:
            entries = await list_entries(session, limit)
        if not entries:
            out.print("no entries")
            return 0
        numbers = ("size", "pins", "age")
        table = plain_table("mm_hash", "state", "shape", "dtype", *numbers, right=numbers)
        for entry in entries:
            spec = entry.spec
            table.add_row(
                entry.mm_hash[:16],
                entry.state,
                f"{spec.shape[0]} x {spec.shape[1]}" if spec else "",
                spec.dtype if spec else "",
                format_bytes(spec.num_bytes) if spec else "",
                str(entry.num_pins),
                f"{entry.age_s:.0f} s",
            )
        out.print(table)
        return 0

    return run(work)


def evict(beginning: str | None, everything: bool) -> int:
    """Evict unpinned entries: all, or the one whose hash begins with `beginning`."""
    if (beginning is None) == (not everything):
        fail("name one content hash (or its beginning), or give --all")
        return 2

    async def work() -> int:
        async with store_session() as session:
            mm_hash = None
            if beginning is not None:
                entries = await list_entries(session)
                matches = [entry.mm_hash for entry in entries if entry.mm_hash.startswith(beginning)]
                if len(matches) != 1:
                    fail(f"{len(matches)} entries begin with {beginning}")
                    return 1
                mm_hash = matches[0]
            expect(Done, await session.request(Evict(seq=0, mm_hash=mm_hash)))
        out.print("evicted")
        return 0

    return run(work)
