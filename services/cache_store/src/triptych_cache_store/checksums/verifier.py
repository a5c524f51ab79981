"""Verifier: takes and compares the checksums of sealed entries in the region, beside the store's work.

Bytes in Redis or on a GPU are not checked. The event loop chooses entries and handles the results
(`ChecksumPass`); one thread reads the bytes.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from blake3 import blake3

from triptych_cache_store.core.state import Out, Outgoing, StoreState, VerifyRequest
from triptych_cache_store.entries.entry_table import Entry, EntryState
from triptych_common.protocol.store import SHM, EntryFault, Verified
from triptych_common.region.layout import RegionLayout
from triptych_common.telemetry.logs import get_logger

STEP_BYTES = 4 << 20  # hashed at once, without the GIL

log = get_logger(__name__)

SEALED = (EntryState.READY, EntryState.PINNED)
BATCH_ENTRIES = 256
BATCH_BYTES = 8 << 20
MAX_FAULTS = 1000


class Checksums:
    """Checksums of entries from `buffer`, the whole region: 32 bits of BLAKE3, to notice accidents."""

    def __init__(self, buffer: memoryview, layout: RegionLayout) -> None:
        self._buffer = buffer
        self._layout = layout

    def has_checksum(self, entry: Entry, checksum: int) -> bool:
        """True if the bytes of `entry` have this checksum."""
        return self.compute([entry]) == [checksum]

    def compute(
        self, entries: Sequence[Entry], is_stopping: Callable[[], bool] = lambda: False
    ) -> list[int] | None:
        """Checksums of the entries in order; None if `is_stopping` became true.

        Callable from any thread. Bytes may change meanwhile: a checksum counts only if its entry is still
        sealed.
        """
        checksums: list[int] = []
        for entry in entries:
            digest = blake3()
            start = self._layout.offset_of(entry.blocks.start)
            end = start + entry.spec.num_bytes
            for offset in range(start, end, STEP_BYTES):
                if is_stopping():
                    return None
                with self._buffer[offset : min(offset + STEP_BYTES, end)] as part:
                    digest.update(part)
            checksums.append(int.from_bytes(digest.digest(4), "little"))
        return checksums


@dataclass(slots=True)
class ChecksumResult:
    """Counts of one checksum pass, and the damaged entries."""

    num_intact: int = 0
    num_recorded: int = 0
    num_gone: int = 0
    num_bytes: int = 0
    damaged: list[EntryFault] = field(default_factory=list)


@dataclass(slots=True)
class ChecksumPass:
    """Take or compare the checksums of sealed entries, and decide what becomes of each. Pure.

    The bytes are read between `is_readable` and `note_checksum`, while the store goes on. A sealed entry does
    not change, and an entry freed meanwhile stays FREED, so the state afterwards decides whether its checksum
    counts. With `evict`, damaged entries are evicted.
    """

    state: StoreState
    evict: bool
    result: ChecksumResult = field(default_factory=ChecksumResult)

    def is_readable(self, entry: Entry) -> bool:
        """True if the entry is still sealed and its header is intact, so that its bytes may be read."""
        if entry.state not in SEALED:
            self.result.num_gone += 1
            return False
        if not self.state.journal.has_intact_header(entry):
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="header"))
            return False
        return True

    def note_checksum(self, entry: Entry, checksum: int) -> None:
        """Record or compare `checksum`, computed from the entry's bytes."""
        if entry.state not in SEALED:
            self.result.num_gone += 1
            return
        self.result.num_bytes += entry.spec.num_bytes
        known = self.state.journal.checksum_of(entry)
        if known is None:
            self.state.journal.note_checksum(entry, checksum)
            self.result.num_recorded += 1
        elif known == checksum:
            self.result.num_intact += 1
        else:
            self._found_damage(entry, EntryFault(mm_hash=entry.mm_hash, fault="checksum"))

    def _found_damage(self, entry: Entry, fault: EntryFault) -> None:
        log.error("entry is damaged", mm_hash=fault.mm_hash, fault=fault.fault, num_pins=entry.num_pins)
        self.result.damaged.append(fault.model_copy(update={"num_pins": entry.num_pins}))
        if self.evict and entry.state is EntryState.READY:
            self.state.space.evict(entry)
        elif self.evict:
            entry.is_damaged = True  # in use: it goes with its last pin


class Verifier:
    """Processes the state's `verify_queue`, and all entries every `interval_s` (None: never)."""

    def __init__(
        self,
        state: StoreState,
        buffer: memoryview,
        deliver: Callable[[Out], None],
        *,
        interval_s: float | None = None,
    ) -> None:
        self._state = state
        self._checksums = Checksums(buffer, state.identity.layout)
        self._deliver = deliver
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._woken = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, "verify")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start in the running event loop; `close` stops it."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="verify")
        self.wake()

    def wake(self) -> None:
        if not self._state.verify_queue.is_empty:
            self._woken.set()

    async def close(self) -> None:
        """Stop; the region is not read afterwards."""
        self._stopping.set()
        self._woken.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown(wait=True)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._step()
            except Exception:
                log.exception("checksum pass failed")

    async def _step(self) -> None:
        queue = self._state.verify_queue
        self._woken.clear()
        if queue.requests:
            await self._reply_to(queue.requests.popleft())
        elif queue.sealed:
            batch = [queue.sealed.popleft() for _ in range(min(len(queue.sealed), BATCH_ENTRIES))]
            await self._run_pass(batch, evict=False)
        else:
            await self._wait()

    async def _wait(self) -> None:
        try:
            await asyncio.wait_for(self._woken.wait(), self._interval_s)
        except TimeoutError:
            result = await self._run_pass(list(self._state.table.all_sealed()), evict=True)
            log.info("entries checked", num_intact=result.num_intact, num_damaged=len(result.damaged))

    async def _reply_to(self, request: VerifyRequest) -> None:
        started_at = time.monotonic()
        entries = list(self._state.table.all_sealed())
        result = await self._run_pass(entries, evict=request.command.evict)
        verified = Verified(
            seq=request.command.seq,
            num_intact=result.num_intact,
            num_recorded=result.num_recorded,
            num_gone=result.num_gone,
            num_damaged=len(result.damaged),
            num_bytes=result.num_bytes,
            elapsed_s=time.monotonic() - started_at,
            damaged=tuple(result.damaged[:MAX_FAULTS]),
        )
        self._deliver([Outgoing(request.session_id, verified)])

    async def _run_pass(self, entries: list[Entry], *, evict: bool) -> ChecksumResult:
        """Compare the checksums that entries have, and take missing ones; `evict` removes damaged entries."""
        checksum_pass, loop = ChecksumPass(self._state, evict), asyncio.get_running_loop()
        for batch in _batches(entry for entry in entries if entry.memory == SHM):
            sealed = [entry for entry in batch if checksum_pass.is_readable(entry)]
            checksums = await loop.run_in_executor(
                self._thread, self._checksums.compute, sealed, self._stopping.is_set
            )
            if checksums is None:
                break
            for entry, checksum in zip(sealed, checksums, strict=True):
                checksum_pass.note_checksum(entry, checksum)
        return checksum_pass.result


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Batches small enough that the store's shutdown never waits long for the thread."""
    batch: list[Entry] = []
    num_bytes = 0
    for entry in entries:
        batch.append(entry)
        num_bytes += entry.spec.num_bytes
        if len(batch) >= BATCH_ENTRIES or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch
