"""Read the streams of one deployment without joining a group: for operators' tools and metrics."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from redis.exceptions import ResponseError

from triptych_common.bus.async_bus import AsyncBus
from triptych_common.protocol.names import everything
from triptych_common.redis_client.commands import find_keys, read_time, run_command, unlink_all


@dataclass(frozen=True)
class GroupLag:
    stream: str  # without the deployment's prefix
    num_entries: int  # in the stream; handled ones are deleted
    group: str | None  # None: the stream has no reader
    num_consumers: int = 0
    num_pending: int = 0  # delivered, not acked
    oldest_s: float | None = None  # Unix seconds, when the oldest entry was published; None: there is none

    @property
    def num_waiting(self) -> int:
        """Number of entries that no consumer has taken; the handled ones are deleted."""
        return max(0, self.num_entries - self.num_pending)


@dataclass(frozen=True)
class RawEntry:
    entry_id: str
    fields: Mapping[str, bytes]

    @property
    def published_s(self) -> float:
        """Redis' clock in seconds when the entry was appended."""
        return int(self.entry_id.split("-")[0]) / 1000


async def list_lags(bus: AsyncBus) -> list[GroupLag]:
    """Return every stream of the deployment with its groups, by name; raises BusUnavailableError."""

    async def read() -> list[GroupLag]:
        return await _lags(bus, await _stream_names(bus))

    return await run_command("list_lags", read)


async def read_lags(bus: AsyncBus, streams: Iterable[str]) -> list[GroupLag]:
    """Return the groups of these streams; missing streams are left out.

    Args:
        streams: without the deployment's prefix.

    Raises:
        BusUnavailableError
    """
    names = list(streams)
    return await run_command("read_lags", lambda: _lags(bus, names))


async def read_clock_s(bus: AsyncBus) -> float:
    """Return Redis' clock in Unix seconds, for ages by the difference to `oldest_s`.

    Raises:
        BusUnavailableError
    """
    seconds, micros = await run_command("read_clock", lambda: read_time(bus.client, bus.names.dead_letters))
    return float(seconds) + float(micros) / 1e6


async def _lags(bus: AsyncBus, names: Iterable[str]) -> list[GroupLag]:
    lags: list[GroupLag] = []
    for name in names:
        key = _prefix(bus) + name
        num_entries = await cast("Any", bus.client.xlen(key))
        try:
            groups = await cast("Any", bus.client.xinfo_groups(key))
        except ResponseError as error:
            if not str(error).startswith("no such key"):
                raise
            continue
        first = await cast("Any", bus.client.xrange(key, count=1))
        oldest_s = RawEntry(first[0][0].decode(), {}).published_s if first else None
        lags += [
            GroupLag(name, num_entries, each["name"].decode(), each["consumers"], each["pending"], oldest_s)
            for each in groups
        ]
        if not groups:
            lags.append(GroupLag(name, num_entries, None, oldest_s=oldest_s))
    return lags


async def read_pending(bus: AsyncBus, streams: Iterable[str], group: str) -> dict[str, int]:
    """Return the number of entries that each consumer of `group` has not acked, over whole stream names.

    Raises:
        BusUnavailableError
    """
    return await run_command("read_pending", lambda: _pending_of(bus, streams, group))


async def _pending_of(bus: AsyncBus, streams: Iterable[str], group: str) -> dict[str, int]:
    pending: dict[str, int] = {}
    for stream in streams:
        try:
            consumers = await cast("Any", bus.client.xinfo_consumers(stream, group))
        except ResponseError as error:
            if not str(error).startswith(("no such key", "NOGROUP")):
                raise
            continue
        for each in consumers:
            name = each["name"].decode()
            pending[name] = pending.get(name, 0) + int(each["pending"])
    return pending


async def find_streams(bus: AsyncBus, beginning: str) -> list[str]:
    """Return stream names without the deployment's prefix: `beginning` itself, else all that begin with it.

    So a namespace's digest can be shortened: `encode-jobs`, `encode-jobs:4f`.

    Raises:
        BusUnavailableError
    """
    names = await run_command("find_streams", lambda: _stream_names(bus))
    if beginning in names:
        return [beginning]
    return [name for name in names if name.replace("{", "").startswith(beginning.replace("{", ""))]


async def _stream_names(bus: AsyncBus) -> list[str]:
    prefix = _prefix(bus)
    keys = await find_keys(bus.client, f"{prefix}*", "stream")
    return sorted(key.decode().removeprefix(prefix) for key in keys)


async def peek(bus: AsyncBus, stream: str, count: int) -> list[RawEntry]:
    """Return up to `count` entries of `stream` (without the deployment's prefix), newest first.

    Raises:
        BusUnavailableError
    """
    found = await run_command(
        "peek", lambda: cast("Any", bus.client.xrevrange(_prefix(bus) + stream, count=count))
    )
    return [
        RawEntry(entry_id.decode(), {name.decode(): value for name, value in fields.items()})
        for entry_id, fields in found
    ]


async def delete_deployment(bus: AsyncBus) -> int:
    """Delete every stream and key of a deployment that will not return; return their number.

    Raises:
        BusUnavailableError
    """
    return await run_command("delete_deployment", lambda: _delete_all(bus))


async def _delete_all(bus: AsyncBus) -> int:
    keys = await find_keys(bus.client, everything(bus.names))
    if keys:
        await unlink_all(bus.client, keys)
    return len(keys)


def _prefix(bus: AsyncBus) -> str:
    return everything(bus.names).removesuffix("*")
