"""`store stats | ls | evict`: a session of our own with the running cache_store."""

from rich.table import Table

from triptych_cli.commands.running import run, store_session
from triptych_cli.console import fail, out
from triptych_common.protocol.store import Done, Entries, Evict, ListEntries, StatsQuery, StoreStats

MOST_ENTRIES = 100_000


def stats() -> int:
    """Bytes by state, then counters."""

    async def work() -> int:
        async with store_session() as session:
            reply = await session.request(StatsQuery(seq=0))
        if not isinstance(reply, StoreStats):
            fail(f"the store answered {reply.TYPE}")
            return 1
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for name, value in reply.model_dump(exclude={"seq", "kind"}).items():
            words = name.removeprefix("num_").removesuffix("_num_bytes").replace("_", " ")
            table.add_row(words, format_bytes(value) if name.endswith("_num_bytes") else str(value))
        out.print(table)
        return 0

    return run(work)


def ls(limit: int) -> int:
    """One row per entry."""

    async def work() -> int:
        async with store_session() as session:
            reply = await session.request(ListEntries(seq=0, limit=limit))
        entries = reply.entries if isinstance(reply, Entries) else ()
        if not entries:
            out.print("no entries")
            return 0
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("mm_hash", "state", "shape", "dtype", "size", "pins", "age"):
            table.add_column(column, justify="right" if column in ("size", "pins", "age") else "left")
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
    """Evict what is not pinned: all, or the one entry whose hash begins so."""
    if (beginning is None) == (not everything):
        fail("name one content hash (or its beginning), or say --all")
        return 2

    async def work() -> int:
        async with store_session() as session:
            mm_hash = None
            if beginning is not None:
                listed = await session.request(ListEntries(seq=0, limit=MOST_ENTRIES))
                entries = listed.entries if isinstance(listed, Entries) else ()
                matches = [entry.mm_hash for entry in entries if entry.mm_hash.startswith(beginning)]
                if len(matches) != 1:
                    fail(f"{len(matches)} entries begin with {beginning}")
                    return 1
                mm_hash = matches[0]
            reply = await session.request(Evict(seq=0, mm_hash=mm_hash))
        if not isinstance(reply, Done):
            fail(f"the store answered {reply.TYPE}")
            return 1
        out.print("evicted")
        return 0

    return run(work)


def format_bytes(num_bytes: int) -> str:
    """With a binary unit, e.g. `1.5 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
