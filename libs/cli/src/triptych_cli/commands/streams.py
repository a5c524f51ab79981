"""`streams peek | lag | dead`: reads the bus of the running system without taking part."""

import re
import time

from rich.markup import escape

from triptych_cli.commands.clients import message_bus, run
from triptych_cli.console import out, plain_table
from triptych_common.bus.inspection import RawEntry, find_streams, list_lags
from triptych_common.bus.inspection import peek as peek_entries

DEAD_LETTERS = "dead-letters"
LONGEST_FIELD = 400
DIGEST = re.compile(r"[0-9a-f]{64}")
SHOWN_DIGITS = 12  # of a namespace's digest: enough to distinguish them, and for `peek`


def lag() -> int:
    """Print one row per group of each stream."""

    async def work() -> int:
        async with message_bus() as bus:
            lags = await list_lags(bus)
        numbers = ("entries", "oldest", "consumers", "pending")
        table = plain_table("stream", *numbers[:2], "group", *numbers[2:], right=numbers)
        for each in lags:
            table.add_row(
                shorten_digest(each.stream),
                str(each.num_entries),
                "-" if each.oldest_s is None else f"{time.time() - each.oldest_s:.0f} s",
                each.group or "-",
                str(each.num_consumers),
                str(each.num_pending),
            )
        out.print(table if lags else "no streams yet")
        return 0

    return run(work)


def peek(stream: str, count: int) -> int:
    """Print entries still in `stream`, or in streams with that prefix, newest first."""

    async def work() -> int:
        async with message_bus() as bus:
            found = {name: await peek_entries(bus, name, count) for name in await find_streams(bus, stream)}
        for name, entries in found.items():
            if name != stream:
                out.print(f"[bold]{escape(shorten_digest(name))}[/]")
            for entry in entries:
                _show(entry)
        if not any(found.values()):
            out.print(f"{escape(stream)} is empty: what was handled is deleted")
        return 0

    return run(work)


def shorten_digest(stream: str) -> str:
    return DIGEST.sub(lambda digest: digest[0][:SHOWN_DIGITS], stream)


def dead(count: int) -> int:

    async def work() -> int:
        async with message_bus() as bus:
            entries = await peek_entries(bus, DEAD_LETTERS, count)
        for entry in entries:
            _show(entry)
        if not entries:
            out.print("no dead letters")
        return 0

    return run(work)


def _show(entry: RawEntry) -> None:
    """Print known fields by name; media only by size."""
    kind = entry.fields.get("type", b"?").decode(errors="replace")
    out.print(f"[bold]{entry.entry_id}[/] {escape(kind)} [dim]{time.time() - entry.published_s:.0f} s ago[/]")
    for name, value in entry.fields.items():
        if name in ("type", "v"):
            continue
        text = f"{len(value)} bytes" if name == "blob" else value.decode(errors="replace")
        if len(text) > LONGEST_FIELD:
            text = f"{text[:LONGEST_FIELD]} ..."
        out.print(f"  {name}: {text}", markup=False, soft_wrap=True)
