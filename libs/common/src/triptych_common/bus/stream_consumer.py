"""Consumer of one stream: flow control, fair shares, takeover, dead letters, reconnection.

An entry that was read or taken over is outstanding until it is acked, handed back, or moved to the dead
letters (rejected, or delivered too often); a consumer that dies loses it to another. At least once: an entry
can come again (after a crash, or when Redis lost an ack). Handlers are idempotent.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from triptych_common.bus.consumer_group import ConsumerGroup, StreamEntry
from triptych_common.bus.consumer_options import ConsumerOptions, FindPeers
from triptych_common.bus.dead_letters import bury
from triptych_common.bus.fair_share import GroupLoad
from triptych_common.domain.errors import ProtocolError
from triptych_common.protocol import codec
from triptych_common.protocol.codec import Envelope
from triptych_common.redis_client.commands import (
    BLOCK_MS,
    is_missing_group,
    is_out_of_memory,
    reconnect_backoff,
    unavailable,
)
from triptych_common.redis_client.server_watch import ServerWatch
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

AHEAD_WAIT_S = 0.01  # for which a consumer that holds more leaves the next entry to others
OWED_ACKS = 16  # of a sole consumer, which deletes entries together
OWED_BLOCK_MS = 250  # block time of a read before which it owes some
AHEAD_BLOCK_MS = 100  # block time of reads: Redis serves waiting consumers in the order in which they began

_UNAVAILABLE = (RedisError, OSError)


@dataclass(frozen=True)
class Delivery:
    """One entry that this consumer owns until `ack`, `reject` or `hand_back`; each is idempotent."""

    envelope: Envelope
    entry_id: str
    num_deliveries: int  # 1: no consumer had it before
    entry: StreamEntry = field(repr=False)
    consumer: "StreamConsumer" = field(repr=False)

    @property
    def stream(self) -> str:
        """Name of the stream that the entry was taken from."""
        return self.consumer.stream

    async def ack(self) -> None:
        """Ack the entry. If Redis is away, the ack is sent when it is back; never raises for that."""
        await self.consumer.ack(self.entry)

    def ack_soon(self) -> None:
        """Ack the entry with the next read and all other acks, without a round trip of its own."""
        self.consumer.ack_soon(self.entry)

    async def reject(self, reason: str) -> None:
        """Move an entry that no consumer can handle to the dead letters.

        If Redis is away the entry stays pending, and comes again.
        """
        await self.consumer.reject(self.entry, reason)

    async def hand_back(self) -> None:
        """Hand back an unhandled entry: any consumer of the group that takes over may have it at once.

        This delivery does not count, so restarts of consumers never send the entry to the dead letters.
        """
        await self.consumer.hand_back([self.entry])


class StreamConsumer:
    """Async context manager and iterator of `Delivery`, made by `AsyncBus.consumer`.

    Iteration survives any loss of Redis: it reconnects with backoff, creates the group again when it
    is gone, and takes up what was delivered to this consumer's name but never reached it.
    """

    def __init__(
        self,
        reader: Redis,
        group: ConsumerGroup,
        dead_letters: str,
        options: ConsumerOptions,
        watch: ServerWatch,
    ) -> None:
        self._reader = reader
        self._group = group
        self._dead_letters = dead_letters
        self._options = options
        self._watch = watch
        self._had_group = False
        self._had_group_at: str | None = None  # run id of the Redis that had it
        self._ready: deque[Delivery] = deque()
        self._outstanding: dict[bytes, StreamEntry] = {}
        self._owed_acks: set[bytes] = set()
        self._room = asyncio.Event()
        self._stopping = False
        self._ensured = False
        self._own_checked = False
        self._was_busy = False  # the last read found entries
        self._next_takeover_at = 0.0
        self._num_failures = 0
        self._renewer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._options.min_idle_ms is not None:
            self._renewer = asyncio.get_running_loop().create_task(
                self._renew_leases(self._options.min_idle_ms / 3000), name=f"renew {self._group.stream}"
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewer is not None:
            self._renewer.cancel()
            await asyncio.gather(self._renewer, return_exceptions=True)
        try:
            await self._pay_acks()
        except _UNAVAILABLE as error:
            log.warning(
                "acks of stream entries not sent", stream=self._group.stream, error=str(error)
            )  # they come again
        await self.hand_back([delivery.entry for delivery in self._ready])
        self._ready.clear()
        await self._reader.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delivery:
        while (delivery := await self.take_within(BLOCK_MS)) is None:
            if self._stopping:
                raise StopAsyncIteration
        return delivery

    async def take_within(self, block_ms: int) -> Delivery | None:
        """Return the next entry once there is room; None if none came within `block_ms`, or after `stop`."""
        if not self._ready:
            await self._wait_for_room()
            if self._stopping:
                return None
            count = self._num_free if self._options.find_peers is None else 1
            for entry, queued_s in await self._fetch(count, block_ms):
                await self._take(entry, queued_s)
        return self._ready.popleft() if self._ready else None

    async def take_spare(self, slots: Mapping[str, int]) -> Delivery | None:
        """Take an entry that the stream's own consumers, with these slots, do not take in time; never waits.

        Used by a consumer of another store, which reads nothing else of the stream.
        """
        if not self._ready:
            try:
                await self._pay_acks()  # no read of this stream does it
                entries = await self._group.take_spare(slots)
                found = [(entry, await self._group.queued_s(entry)) for entry in entries]
            except _UNAVAILABLE as error:
                log.info("entries of another stream not read", stream=self.stream, error=repr(error))
                return None
            for entry, queued_s in found:
                await self._take(entry, queued_s)
        return self._ready.popleft() if self._ready else None

    def stop(self) -> None:
        """Stop taking entries: iteration ends after those already taken, within one block time."""
        self._stopping = True
        self.notice_room()

    @property
    def is_stopped(self) -> bool:
        return self._stopping

    @property
    def stream(self) -> str:
        return self._group.stream

    def notice_room(self) -> None:
        """Wake the reader: an entry is done, here or where `num_elsewhere` counts."""
        self._room.set()
        self._options.on_room()

    @property
    def num_outstanding(self) -> int:
        """Number of entries taken and neither acked nor given up."""
        return len(self._outstanding)

    @property
    def is_connected(self) -> bool:
        """True if the last command to Redis succeeded."""
        return self._ensured and self._num_failures == 0

    # ---- taking entries ----
    async def _wait_for_room(self) -> None:
        while not self._stopping and self._num_free <= 0:
            self._room.clear()
            await self._room.wait()

    @property
    def _num_free(self) -> int:
        return self._options.prefetch - self._num_in_hand

    @property
    def _num_in_hand(self) -> int:
        return len(self._outstanding) + self._options.num_elsewhere()

    async def _fetch(self, count: int, block_ms: int) -> list[tuple[StreamEntry, float]]:
        """Return entries, each with the seconds it waited."""
        try:
            entries = await self._fetch_once(count, block_ms)
            return [(entry, await self._group.queued_s(entry)) for entry in entries]
        except _UNAVAILABLE as error:
            self._lost(error)
            is_gone = isinstance(error, ResponseError) and is_missing_group(error)
            if not is_gone or self._num_failures > 1:  # the first time, create it at once
                await self._back_off()
            return []
        except BaseException:
            self._own_checked = False  # cancelled: Redis may have delivered what we no longer read
            raise

    async def _fetch_once(self, count: int, block_ms: int) -> list[StreamEntry]:
        if not self._ensured:
            await self._ensure_group()
        held = self._outstanding.keys() | self._owed_acks
        if not self._own_checked:
            if own := await self._group.take_own(count, held):
                return own
            self._own_checked = True
        min_idle_ms = self._options.min_idle_ms
        if min_idle_ms is not None:
            takeover_ms = max(1, min(BLOCK_MS, min_idle_ms // 2))
            block_ms = min(block_ms, takeover_ms)
            if time.monotonic() >= self._next_takeover_at:
                if dead := await self._group.take_over(count, min_idle_ms, held):
                    return dead
                self._next_takeover_at = time.monotonic() + takeover_ms / 1000
        find_peers = self._options.find_peers
        if find_peers is not None and await self._is_ahead(find_peers):
            block_ms = min(block_ms, AHEAD_BLOCK_MS)
        owed = set(self._owed_acks)
        if self._group.is_sole and self._was_busy and len(owed) < OWED_ACKS:
            owed, block_ms = set(), min(block_ms, OWED_BLOCK_MS) if owed else block_ms
        entries = await self._group.read_new(count, block_ms, owed)
        self._owed_acks -= owed
        self._was_busy = bool(entries)
        if self._group.is_sole:  # at a start both this and `take_own` find what came before
            entries = [each for each in entries if each.entry_id not in held]
        if self._num_failures:
            log.info("bus is back", stream=self._group.stream, num_failures=self._num_failures)
            self._num_failures = 0
        return entries

    async def _is_ahead(self, find_peers: FindPeers) -> bool:
        """Return whether other consumers would be done sooner, so that waiting entries are left to them.

        If they do not take them, this consumer does: it waits once, no longer than `AHEAD_WAIT_S`.
        """
        consumers, name, num_outstanding = await find_peers(), self._group.consumer, self._num_in_hand
        if not consumers.num_owed(GroupLoad(0, {}), name, num_outstanding):
            return False  # whatever the others hold
        load = await self._group.read_load()
        if consumers.must_let_go_first(load, name, num_outstanding):
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AHEAD_WAIT_S):
                    await self._room.wait()  # one of its own was done
        return consumers.num_owed(load, name, num_outstanding) > 0

    async def _pay_acks(self) -> None:
        if self._owed_acks:
            owed = set(self._owed_acks)
            await self._group.ack(owed)
            self._owed_acks -= owed

    async def _ensure_group(self) -> None:
        try:
            is_new = await self._group.ensure()
        except ResponseError as error:
            if not is_out_of_memory(error):
                raise
            is_new = False  # refused unread: most likely the group is there, and reading is allowed
        if is_new and self._had_group and self._had_group_at == self._watch.run_id:
            self._watch.group_was_lost()  # another run id is a change of its own
        self._had_group, self._had_group_at = True, self._watch.run_id
        self._ensured = True

    async def _take(self, entry: StreamEntry, queued_s: float) -> None:
        """Pass `entry` to the caller, or bury it."""
        try:
            envelope = codec.decode(entry.fields, queued_s=queued_s)
        except ProtocolError as error:
            log.warning("stream entry refused", stream=self._group.stream, reason=str(error))
            await self.reject(entry, f"{type(error).__name__}: {error}")
            return
        limit = self._options.max_deliveries
        if limit is not None and entry.num_deliveries > limit:
            reason = f"delivered {entry.num_deliveries - 1} times, limit {limit}"
            log.warning("stream entry given up", stream=self._group.stream, reason=reason)
            if self._options.on_dead_letter is not None:
                await self._options.on_dead_letter(envelope, reason)
            await self.reject(entry, reason)
            return
        self._outstanding[entry.entry_id] = entry
        self._ready.append(
            Delivery(
                envelope=envelope,
                entry_id=entry.entry_id.decode(),
                num_deliveries=entry.num_deliveries,
                entry=entry,
                consumer=self,
            )
        )

    # ---- giving entries up ----
    async def ack(self, entry: StreamEntry) -> None:
        """Ack an entry now; `Delivery.ack` describes it."""
        if self._outstanding.pop(entry.entry_id, None) is None:
            return
        self._owed_acks.add(entry.entry_id)
        self.notice_room()
        try:
            await self._group.ack([entry.entry_id])
        except _UNAVAILABLE as error:
            log.warning("ack of a stream entry delayed", stream=self._group.stream, error=str(error))
            return
        self._owed_acks.discard(entry.entry_id)

    def ack_soon(self, entry: StreamEntry) -> None:
        """Ack an entry with the next read; `Delivery.ack_soon` describes it."""
        if self._outstanding.pop(entry.entry_id, None) is not None:
            self._owed_acks.add(entry.entry_id)
            self.notice_room()

    async def reject(self, entry: StreamEntry, reason: str) -> None:
        """Move an entry to the dead letters; `Delivery.reject` describes it."""
        self._outstanding.pop(entry.entry_id, None)
        self.notice_room()
        try:
            await bury(self._group, entry, reason, self._dead_letters)
        except _UNAVAILABLE as error:
            self._lost(error)
            await self._back_off()

    async def hand_back(self, entries: list[StreamEntry]) -> None:
        """Hand entries back; `Delivery.hand_back` describes it."""
        # Skip entries that were acked or handed back before: they may be another consumer's by now.
        ours = [entry for entry in entries if self._outstanding.pop(entry.entry_id, None) is not None]
        self.notice_room()
        self._own_checked = self._own_checked and not (ours and self._group.is_sole)
        try:
            await self._group.hand_back(ours)
        except _UNAVAILABLE as error:
            # They are taken over all the same, only later.
            log.warning("stream entries not handed back", stream=self._group.stream, error=str(error))

    # ---- staying connected ----
    async def _renew_leases(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            if not self._outstanding:
                continue
            try:
                await self._group.renew(self._outstanding.keys())
            except _UNAVAILABLE as error:
                log.warning(
                    "lease of stream entries not renewed", stream=self._group.stream, error=str(error)
                )
            except Exception:  # this task is not awaited
                log.exception("lease of stream entries not renewed", stream=self._group.stream)

    def _lost(self, error: Exception) -> None:
        """Start over: the group may be gone, and the reply to a read may have been lost."""
        if self._num_failures == 0:
            log.warning("bus lost", stream=self._group.stream, error=str(unavailable("read", error)))
        self._num_failures += 1
        self._ensured = False
        self._own_checked = False

    async def _back_off(self) -> None:
        await asyncio.sleep(reconnect_backoff().compute(self._num_failures))
