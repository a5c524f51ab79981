"""ItemWait: wait of one request for its media items, and the events that change it.

EncodeOrders    known | ordered | joined -> placed -> sized -> sealed, failed
TransferOrders  entries_read, store_lost, target_chosen, transfer_given_up
either          needed_again (an engine started over)
forward         prefilled, answer_began, answered
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych_common.domain.errors import RequestError
from triptych_common.domain.fair_queue import DEFAULT_KEY, FairKey
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import FailureKind, Modality
from triptych_common.protocol.transfers import EntryPlace
from triptych_gateway.encode.item_table import ItemFailure
from triptych_gateway.encode.sizes import ItemSizes
from triptych_gateway.errors import EncodeUnavailableError, unavailable
from triptych_gateway.locality.encode_stores import JobPlace
from triptych_gateway.request.media import TakenItem
from triptych_gateway.request.prompt_length import too_long
from triptych_gateway.tracing.timings import ItemSource, ItemTiming

RENEWED_WAIT_S = 30.0  # for an item that prefill_decode needs again


@dataclass(eq=False)
class ItemWait:
    """Wait that events fill in and the request awaits; nothing else changes it once it is open.

    Until the first chunk of the answer every item is needed. After that prefill_decode has had them all:
    another request's job for one of them does not matter to this request, unless prefill_decode asks for it
    again.
    """

    request_id: RequestId
    prefill_decode: str
    items: Sequence[TakenItem]
    deadline: float  # monotonic seconds; the wait for the items ends then. At first: for the first token
    traceparent: str | None
    namespace_digest: str  # that the items' mm_hash were made with
    max_model_len: int | None = None  # tokens that a prompt may have; None: not known
    fair_key: FairKey = DEFAULT_KEY  # among those that wait for encoders
    opened_at: float = field(default_factory=time.monotonic)  # monotonic seconds
    timings: Mapping[MmHash, ItemTiming] = field(default_factory=dict)  # to be filled in, where there are any
    sizes: dict[MmHash, ItemSizes] = field(default_factory=dict)
    entry_places: dict[MmHash, tuple[EntryPlace, ...]] = field(default_factory=dict)
    """Directory's places of the items' entries, with several registered stores."""
    target: str | None = None  # store of the instance to which it goes; None: `prefill_decode`'s, so far
    answered_by: str | None = None  # the instance whose answer went out whole
    sealed_at: float | None = None  # monotonic seconds; the last seal so far of an item encoded for it
    needed_at: float = 0.0  # monotonic seconds; when prefill_decode last asked for an item again
    _all_sized: asyncio.Event = field(default_factory=asyncio.Event)
    _sealed: set[MmHash] = field(default_factory=set)
    _all_sealed: asyncio.Event = field(default_factory=asyncio.Event)
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _error: RequestError | None = None
    _needed: set[MmHash] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._needed.update(self.mm_hashes)

    @property
    def mm_hashes(self) -> tuple[MmHash, ...]:
        """Distinct items, in the order of the prompt."""
        return tuple(dict.fromkeys(item.mm_hash for item in self.items))

    @property
    def modalities(self) -> frozenset[Modality]:
        return frozenset(item.part.modality for item in self.items)

    @property
    def first_without_sizes(self) -> str | None:
        """Path of the first item without known sizes."""
        return next((item.part.path for item in self.items if item.mm_hash not in self.sizes), None)

    @property
    def num_rows(self) -> int:
        """Rows of all items with known sizes; each takes a token's place."""
        return sum(self.sizes[item.mm_hash].num_embeds for item in self.items if item.mm_hash in self.sizes)

    def needs(self, mm_hash: MmHash) -> bool:
        return mm_hash in self._needed

    # ---- events of an item; the trace and the page at `/ui` show its timing ----------------------
    def on_known(self, mm_hash: MmHash, source: ItemSource) -> None:
        if (timing := self.timings.get(mm_hash)) is not None:
            timing.on_known(source)

    def on_ordered(self, mm_hash: MmHash) -> None:
        if (timing := self.timings.get(mm_hash)) is not None:
            timing.on_ordered(time.monotonic())

    def on_joined(self, mm_hash: MmHash) -> None:
        """Record that the item is encoded for another request already."""
        if (timing := self.timings.get(mm_hash)) is not None:
            timing.on_joined(time.monotonic())

    def on_placed(self, mm_hash: MmHash, place: JobPlace) -> None:
        """Record that the item's job is published, for the encoders of a store."""
        if (timing := self.timings.get(mm_hash)) is not None:
            timing.on_placed(place.store, place.reason.value)

    def on_sized(self, mm_hash: MmHash, sizes: ItemSizes) -> None:
        """Record sizes. A prompt that exceeds the model's length fails at once: no other encode is needed."""
        if (timing := self.timings.get(mm_hash)) is not None:
            timing.on_sizes(sizes.num_embeds, time.monotonic())
        self.sizes[mm_hash] = sizes
        num_tokens = self.num_rows + 1
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            self._fail(too_long(num_tokens, self.max_model_len))
        if all(needed in self.sizes for needed in self.mm_hashes):
            self._all_sized.set()

    def on_sealed(self, mm_hash: MmHash) -> None:
        self.sealed_at = time.monotonic()
        self._sealed.add(mm_hash)
        if self._sealed.issuperset(self.mm_hashes):
            self._all_sealed.set()

    def on_failed(self, mm_hash: MmHash, failure: ItemFailure) -> None:
        """Fail with the first failure; failures of received items are ignored."""
        if self._error is None and self.needs(mm_hash):
            part = self.item_of(mm_hash).part
            self._fail(error_for(failure, part.path, part.modality))

    def on_transfer_given_up(self, mm_hash: MmHash) -> None:
        """Fail: the item cannot be brought to the store of the request's prefill_decode."""
        if self.needs(mm_hash):
            path = self.item_of(mm_hash).part.path
            message = f"{path} could not be transferred to the instance that serves this request"
            self._fail(EncodeUnavailableError("transfer_failed", message, path))

    def on_needed_again(self, mm_hash: MmHash) -> None:
        """Record that prefill_decode lacks the item, having started over after the first token.

        A whole answer does not show its first token: all its items count as needed until its end, which may
        be long after the first deadline.
        """
        self.needed_at = time.monotonic()
        self._needed.add(mm_hash)
        self.deadline = max(self.deadline, self.needed_at + RENEWED_WAIT_S)

    # ---- events of entries and of the answer -----------------------------------------------------
    def on_entries_read(self, places: Mapping[MmHash, tuple[EntryPlace, ...]]) -> None:
        """Record what the directory has; an entry without places is to be read again."""
        self.entry_places.update(places)
        for entry in [each for each, found in places.items() if not found]:
            del self.entry_places[entry]

    def on_store_lost(self, entries: Sequence[MmHash], store: str) -> None:
        """Record that a store has these entries no more."""
        for entry in entries:
            known = self.entry_places.get(entry, ())
            self.entry_places[entry] = tuple(each for each in known if each.store != store)

    def on_target_chosen(self, store: str | None) -> None:
        self.target = store

    def on_prefilled(self, instance: str) -> None:
        """Record that the instance has made the prompt's KV cache, so its engine had all items.

        Another may have to make the KV cache again; the instance that the items were announced to has sent
        its acks then.
        """
        if self.answered_by != self.prefill_decode:
            self.answered_by = instance
        self._settle()

    def on_answered(self, instance: str) -> None:
        """Record that the instance's answer went out whole, so its engine had all items."""
        self.answered_by = instance

    def on_answer_began(self) -> None:
        """Record the first chunk of the answer: all items were used."""
        self._settle()

    def _settle(self) -> None:
        """Record that all items were used: a failure of one no longer matters."""
        self._needed.clear()
        self._error = None
        self._failed.clear()

    def item_of(self, mm_hash: MmHash) -> TakenItem:
        """Return the first of the request's items that is `mm_hash`."""
        return next(item for item in self.items if item.mm_hash == mm_hash)

    def _fail(self, error: RequestError) -> None:
        if self._error is None:
            self._error = error
            self._failed.set()

    async def wait_sizes(self) -> None:
        """Return when the sizes of all items are known. Bound it with `wait_failure` and a deadline."""
        await self._all_sized.wait()

    async def wait_sealed(self) -> None:
        """Return when all items are in the store. Bound it in the same way."""
        await self._all_sealed.wait()

    async def wait_failure(self) -> None:
        """Raise when an item failed, as a guard. Raises RequestError: the caller's error."""
        while True:
            await self._failed.wait()
            self.raise_failure()  # else settled in the same moment: go on waiting

    def raise_failure(self) -> None:
        if self._error is not None:
            raise self._error


def error_for(failure: ItemFailure, path: str, modality: Modality) -> RequestError:
    """Return the caller's error for the failed item at `path`.

    `detail` of bad media is the encoder's and names the fault; other details are for the log.
    """
    if failure.answer is not None:
        answer = failure.answer
        retry_after_s = answer.retry_after_s
        return RequestError(
            answer.status_code, answer.code, answer.message, path, retry_after_s=retry_after_s
        )
    if failure.kind is FailureKind.BAD_MEDIA:
        return RequestError(400, f"invalid_{modality}", f"{path}: {failure.detail}"[:1000], path)
    if failure.kind is FailureKind.TOO_LARGE:
        return RequestError(413, f"{modality}_too_large", f"{path}: {failure.detail}"[:1000], path)
    if failure.kind is FailureKind.STORE_FULL:
        return EncodeUnavailableError("store_full", "no room for the encoder's output at the moment", path)
    if failure.kind is FailureKind.EXPIRED:
        return EncodeUnavailableError("deadline_exceeded", f"{path} could not be encoded in time", path)
    if failure.kind is None:
        return EncodeUnavailableError("bus_unavailable", failure.detail, path)
    message = f"{path} could not be encoded, though it seems valid; try again"
    if failure.kind is FailureKind.DEAD_LETTER:  # it may have ended its encoders: no other engine gets it
        return unavailable("encode_failed", message, path)
    return EncodeUnavailableError("encode_failed", message, path)
