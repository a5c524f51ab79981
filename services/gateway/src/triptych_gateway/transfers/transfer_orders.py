"""TransferOrders: brings the items that requests need to the stores where they need them.

It learns places from encoders (`ItemPlaces`) and the directory, sends `TransferOrder`s to the agents beside
the sources, and handles their results: another source, another encode, or one clear error. The choice of the
next step is pure (`next_step`, `transfer_table`).

`run` must run. `on_result` gets every message of `encode-results:{gateway}` first.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

from triptych_common.bus import AsyncBus
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.domain.fair_queue import LEVELS
from triptych_common.protocol.ids import MmHash, RequestId
from triptych_common.protocol.messages import EncodeClass, EncodeNeeded, InstanceRecord, Message
from triptych_common.protocol.transfers import (
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.encode.encode_orders import EncodeOrders
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.locality.item_places import ItemPlace
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.settings import TransferSettings
from triptych_gateway.transfers.fabric_view import NOT_OF_THE_LINK, FabricView, LinkRates
from triptych_gateway.transfers.next_step import StepKind, TransferSource, next_step
from triptych_gateway.transfers.place_finder import DirectoryNotes, PlaceFinder
from triptych_gateway.transfers.transfer_table import (
    ItemTransfers,
    OrderReason,
    Transfer,
    TransferKey,
    TransferState,
)
from triptych_gateway.transfers.transfer_trace import TransferTraces

log = get_logger(__name__)

PREDICTED_TIMES = 3.0  # times the predicted duration, after which a transfer counts as silent
MAX_EXTENSIONS = 4  # extensions for an agent that is alive: it may wait for room at the target
RETRY_S = (0.0, 0.25, 1.0)  # before what follows the first failure, the second, and later ones
CHECK_S = 0.5  # how often it is looked whether agents have begun another life
NEVER = float("inf")
NO_AGENT, SILENT, NOT_SENT = "no_agent", "silent", "not_sent"  # failures that no agent reports


class TransferOrders:
    """Owner of the table of transfers. Everything runs on the gateway's loop."""

    def __init__(
        self,
        *,
        bus: AsyncBus,
        gateway: str,
        fabric: FabricView,
        orders: EncodeOrders,
        notes: DirectoryNotes,
        rates: LinkRates,
        settings: TransferSettings,
        metrics: GatewayMetrics,
    ) -> None:
        self._bus = bus
        self._gateway = gateway
        self._fabric = fabric
        self._orders = orders
        self._settings = settings
        self._metrics = metrics
        self._notes = notes
        self.table, self.rates = ItemTransfers(), rates
        self.places = PlaceFinder(fabric, orders, notes, self.rates)
        self._waits: dict[RequestId, ItemWait] = {}
        self._targets: dict[RequestId, str] = {}  # store where each of them needs its items now
        self._unsent: deque[tuple[InstanceRecord, TransferOrder, Transfer]] = deque()
        self._to_look_up: dict[TransferKey, Transfer] = {}
        self._traces = TransferTraces()
        self._boot_ids: dict[str, str] = {}  # of the agents that have orders, by their store, as of the last
        self._changed = asyncio.Event()

    # ---- a request's side ------------------------------------------------------------------------
    @contextmanager
    def hold(self, item_wait: ItemWait) -> Iterator[None]:
        """Hold a request that may need its items elsewhere, until the block ends.

        From now on new ones are pushed to the store of `item_wait.prefill_decode` as soon as an encoder
        announces them.
        """
        request_id = item_wait.request_id
        self._waits[request_id] = item_wait
        try:
            target = self._fabric.store_of(item_wait.prefill_decode)
            for transfer in self._join(item_wait, target):
                if transfer.state is TransferState.WAITING and self.places.is_encoding(transfer.mm_hash):
                    self._advance(transfer)
            yield
        finally:
            self._leave(item_wait)
            del self._waits[request_id]

    async def bring(self, item_wait: ItemWait, record: InstanceRecord) -> None:
        """Bring the request's items to the store of `record`'s instance, which is about to get it.

        Their sizes are known. With one registered store, nothing is done.
        """
        item_wait.on_target_chosen(record.store or item_wait.target)
        old = [
            each.mm_hash
            for each in self._join(item_wait, record.store)
            if each.state is TransferState.WAITING and not self.places.is_encoding(each.mm_hash)
        ]
        await self.places.complete(item_wait, old, item_wait.target)
        for transfer in self._join(item_wait, record.store):
            if transfer.state is TransferState.WAITING and not transfer.num_attempts:
                self._advance(transfer)

    def _join(self, item_wait: ItemWait, target: str | None) -> list[Transfer]:
        """Join the transfers of a request; none if its wait has ended, or with one registered store."""
        request_id = item_wait.request_id
        if request_id not in self._waits or target is None:
            return []
        if self._targets.get(request_id, target) != target:
            self._leave(item_wait)
        if not self._fabric.are_apart:
            return []
        self._targets[request_id] = target
        return [self.table.join(each, target, request_id) for each in item_wait.mm_hashes]

    def _leave(self, item_wait: ItemWait) -> None:
        target = self._targets.pop(item_wait.request_id, None)
        if target is not None:
            for mm_hash in item_wait.mm_hashes:
                if (transfer := self.table.get(mm_hash, target)) is not None:
                    self._traces.note_left(transfer, [item_wait])
                self.table.leave(item_wait.request_id, (mm_hash, target))

    def _waits_of(self, transfer: Transfer) -> list[ItemWait]:
        return [self._waits[each] for each in sorted(transfer.request_ids) if each in self._waits]

    # ---- messages --------------------------------------------------------------------------------
    def on_result(self, message: Message) -> bool:
        """Handle a message of `encode-results:{gateway}`; return True if no other handler needs it."""
        match message:
            case TransferCompleted():
                self._on_completed(message)
            case TransferFailed():
                self._on_failed(message)
            case EncodeNeeded():
                return self._on_needed(message)
            case _:
                return False
        return True

    def _on_completed(self, message: TransferCompleted) -> None:
        now, mm_hash = time.monotonic(), MmHash(message.mm_hash)
        self.rates.observe((message.source, message.target), message.num_bytes, message.transfer_s, now)
        ordered = self.table.ordered(message.transfer_id)  # None: its requests have left, or it was silent
        if (told := ordered or self._traces.find_left(message.transfer_id)) is not None:
            self._metrics.transfer_s.observe(now - told.ordered_at)
            self._show(told, now, "completed", message)
        known_num_bytes = 0 if told is None else told.num_bytes
        self.places.note_held(mm_hash, message.target, message.num_bytes or known_num_bytes)
        if (transfer := ordered or self.table.get(mm_hash, message.target)) is not None:
            if transfer is not ordered:  # by an earlier order; a later one's report is still to come
                self._traces.note_left(transfer, self._waits_of(transfer))
            self.table.hold(transfer)

    def _on_failed(self, message: TransferFailed) -> None:
        transfer = self.table.ordered(message.transfer_id)
        known = self._orders.places.find(MmHash(message.mm_hash))
        is_being_made = known is not None and not known.is_sealed and known.store == message.source
        if message.kind is TransferFailureKind.ABSENT and not is_being_made:
            waits = [] if transfer is None else self._waits_of(transfer)
            self.places.forget(MmHash(message.mm_hash), message.source, waits)
        if transfer is None:
            if (told := self._traces.find_left(message.transfer_id)) is not None:
                self._show(told, time.monotonic(), str(message.kind))
            return
        fields = message.model_dump(include={"transfer_id", "source", "target", "kind", "detail"})
        log.warning("transfer of an item failed", **fields)
        self._fail(transfer, message.kind)

    def _on_needed(self, message: EncodeNeeded) -> bool:
        """Handle a prefill_decode's missing item; return True if it is on its way or is sent again."""
        mm_hash, item_wait = MmHash(message.mm_hash), self._waits.get(RequestId(message.request_id))
        target = None if item_wait is None else self._targets.get(item_wait.request_id)
        transfer = None if target is None else self.table.get(mm_hash, target)
        if item_wait is None or transfer is None:
            return False
        if self._fabric.store_of(message.prefill_decode) not in (None, transfer.target):
            return True  # by an instance that the request has left
        item_wait.on_needed_again(mm_hash)
        state, transfer.is_missed = transfer.state, True
        is_lost = message.reason == "writer_lost" and transfer.loses_writer(time.monotonic())
        if state in (TransferState.HELD, TransferState.FAILED):
            self.places.forget(mm_hash, transfer.target, self._waits_of(transfer))
            self.table.need_again(transfer)
            self._advance(transfer)
        elif state is TransferState.WAITING and transfer.due_at == NEVER:
            self._advance(transfer)
        elif is_lost and not self._fabric.has_several_ways(transfer.source, target):  # else it goes on
            log.warning("fabric agent of a target went away during a transfer", target=transfer.target)
            self._fail(transfer, TransferFailureKind.UNREACHABLE)
        return transfer.state is TransferState.ORDERED or transfer.due_at < NEVER

    # ---- one transfer ----------------------------------------------------------------------------
    def _advance(self, transfer: Transfer) -> None:
        now, waits = time.monotonic(), self._waits_of(transfer)
        transfer.due_at = NEVER
        step = next_step(
            transfer,
            self.places.sources_of(transfer.mm_hash, transfer.target, waits, now),
            is_encoding=self.places.is_encoding(transfer.mm_hash),
            max_attempts=self._settings.max_transfer_attempts,
        )
        if step.kind is StepKind.HOLD:
            self.table.hold(transfer)
        elif step.kind is StepKind.GIVE_UP:
            self._give_up(transfer)
        elif step.source is not None:
            self._order(transfer, step.source, now)
        elif not any(each.needs(transfer.mm_hash) for each in waits):
            return  # a request that needs it once more orders it
        elif step.kind is StepKind.LOOK_UP:
            transfer.due_at = now  # not NEVER: what its prefill_decode asks for meanwhile orders no encode
            self._to_look_up[transfer.key] = transfer
            self._changed.set()
        elif step.kind is StepKind.ENCODE:
            transfer.num_encodes += 1
            fields = {"mm_hash": transfer.mm_hash, "target": transfer.target, "failure": transfer.failure}
            log.info("item is encoded again for another store", near=step.near, **fields)
            self._orders.order_near(transfer.mm_hash, step.near)

    def _order(self, transfer: Transfer, source: TransferSource, now: float) -> None:
        if transfer.reason is OrderReason.NEW and not source.is_new:
            transfer.reason = OrderReason.DIRECTORY
        agent, entries = self._fabric.agent_of(source.store), self.places.entries_of(transfer.mm_hash)
        order = transfer_order(transfer, source.store, entries, self._gateway, self._waits_of(transfer))
        # How long its encode takes is not the agent's fault: the timer runs from the seal.
        due_at = self._silent_at(transfer, source.store, source.num_bytes, now) if source.is_sealed else NEVER
        self.table.order(transfer, order.transfer_id, source.store, source.num_bytes, now, due_at)
        if agent is None:
            self._fail(transfer, NO_AGENT)
            return
        self._metrics.transfers_ordered.labels(transfer.reason.value).inc()
        self._unsent.append((agent, order, transfer))
        self._boot_ids[source.store] = agent.boot_id
        self._changed.set()

    def _silent_at(self, transfer: Transfer, source: str, num_bytes: int, now: float) -> float:
        """Return when silence counts as a failure; transfers under way on the link come first."""
        link = (source, transfer.target)
        num_ahead = self.table.bytes_under_way(*link)
        seconds = self.rates.seconds(link, num_ahead + num_bytes, now)
        return now + self._settings.transfer_grace_s + PREDICTED_TIMES * seconds

    def _on_no_answer(self, transfer: Transfer, now: float) -> None:
        """Extend the time of an agent that lives: it may wait for room at the target."""
        source = transfer.source or ""
        agent, waits = self._fabric.agent_of(source), self._waits_of(transfer)
        if agent is not None and agent.boot_id == self._boot_ids.get(source):
            until = max((each.deadline for each in waits), default=now)
            if transfer.num_extensions < MAX_EXTENSIONS and now < until:
                self.table.extend(transfer, min(until, self._silent_at(transfer, source, 0, now)))
                return
        log.warning("fabric agent silent about a transfer", source=source)
        self._fail(transfer, SILENT)

    def _fail(self, transfer: Transfer, kind: str) -> None:
        """Fail the ordered attempt; the next one is due a little later each time."""
        now = time.monotonic()
        self._show(transfer, now, str(kind))
        if transfer.source is not None and kind not in NOT_OF_THE_LINK:
            self.rates.avoid((transfer.source, transfer.target), now)
        delay_s = RETRY_S[min(transfer.num_attempts, len(RETRY_S)) - 1]
        self.table.fail_attempt(transfer, str(kind), now + delay_s)
        self._changed.set()

    def _give_up(self, transfer: Transfer) -> None:
        fields = {"mm_hash": transfer.mm_hash, "target": transfer.target, "failure": transfer.failure}
        log.warning("item not brought to the store of its prefill_decode", **fields)
        self.table.give_up(transfer)
        for item_wait in self._waits_of(transfer):
            item_wait.on_transfer_given_up(transfer.mm_hash)

    def _show(
        self, transfer: Transfer, now: float, result: str, completed: TransferCompleted | None = None
    ) -> None:
        """Record the end of an order, in metrics and in the trace of each request that waits or waited."""
        self._metrics.transfers.labels(result).inc()
        failure = result if completed is None else None
        self._traces.record(transfer, self._waits_of(transfer), now, completed=completed, failure=failure)

    # ---- tasks -----------------------------------------------------------------------------------
    async def run(self) -> None:
        """Run the background tasks for ever."""
        async with asyncio.TaskGroup() as group:
            for each in (self._follow_places(), self._follow_time(), self._notes.run()):
                group.create_task(each)

    async def _follow_places(self) -> None:
        while True:
            await self._orders.places.wait_changed()
            for place in self._orders.places.take_changed():
                self.places.note_sealed(place)
                for transfer in self.table.of_item(place.mm_hash):
                    self._on_place(transfer, place)

    def _on_place(self, transfer: Transfer, place: ItemPlace) -> None:
        self.table.made_again(transfer, place.store)
        if transfer.state is TransferState.ORDERED and transfer.due_at == NEVER:
            if transfer.source != place.store:  # its encoder was lost, and another one makes it
                self._fail(transfer, TransferFailureKind.WRITER_LOST)
            elif place.is_sealed:
                now = time.monotonic()
                transfer.due_at = self._silent_at(transfer, place.store, 0, now)
                self._changed.set()
        elif transfer.state is TransferState.WAITING and transfer.due_at == NEVER:
            self._advance(transfer)

    async def _follow_time(self) -> None:
        """Send orders and handle those that are due, for ever."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            for transfer in self.table.due(now):
                if transfer.state is TransferState.ORDERED:
                    self._on_no_answer(transfer, now)
                else:
                    self._advance(transfer)
            self._fail_restarted()
            if self._to_look_up:
                await self._look_up_all()
            if self._unsent:
                await self._send_all()
                continue
            until = min(self.table.next_due(), now + CHECK_S if self.table.num_ordered else NEVER)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if until == NEVER else max(0.0, until - now)):
                    await self._changed.wait()

    def _fail_restarted(self) -> None:
        """Fail the orders of an agent that was restarted, which gets them again.

        Orders in its stream and the new ones are one transfer to it.
        """
        for store, boot_id in list(self._boot_ids.items()):
            agent = self._fabric.agent_of(store)
            if agent is None or agent.boot_id == boot_id:
                continue  # one that is missing may come back: the timer counts
            del self._boot_ids[store]
            for transfer in self.table.ordered_from(store):
                self._fail(transfer, NO_AGENT)
                self.table.made_again(transfer, store)

    async def _look_up_all(self) -> None:
        """Look up the places of items of failed transfers: a drain may have moved one."""
        transfers, self._to_look_up = list(self._to_look_up.values()), {}
        await self.places.look_up((each.mm_hash, self._waits_of(each)) for each in transfers)
        for transfer in transfers:
            is_left = self.table.get(*transfer.key) is transfer
            if is_left and transfer.state is TransferState.WAITING and transfer.num_attempts:
                transfer.is_looked_up = True
                self._advance(transfer)

    async def _send_all(self) -> None:
        unsent = [self._unsent.popleft() for _ in range(len(self._unsent))]
        await asyncio.gather(*(self._send(*each) for each in unsent))

    async def _send(self, agent: InstanceRecord, order: TransferOrder, transfer: Transfer) -> None:
        waits = self._waits_of(transfer)
        if self.table.ordered(order.transfer_id) is None or not waits:
            return  # its requests have left
        remaining_s = max(each.deadline for each in waits) - time.monotonic()
        try:
            async with asyncio.timeout(self._settings.publish_timeout_s):
                await self._bus.publish(
                    self._bus.names.transfers(agent.instance),
                    order,
                    traceparent=waits[0].traceparent,
                    remaining_ms=max(1, int(remaining_s * 1000)),
                )
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("transfer order not published", agent=agent.instance, error=repr(error))
            if self.table.ordered(order.transfer_id) is transfer:
                self._fail(transfer, NOT_SENT)


def transfer_order(
    transfer: Transfer, source: str, entries: tuple[MmHash, ...], gateway: str, item_waits: Iterable[ItemWait]
) -> TransferOrder:
    """Return the order to the agent of store `source`, of the highest class among `item_waits`."""
    classes = (each.fair_key.encode_class for each in item_waits)
    return TransferOrder(
        transfer_id=f"transfer-{uuid4().hex}",
        mm_hash=transfer.mm_hash,
        entries=entries,
        source=source,
        target=transfer.target,
        gateway=gateway,
        encode_class=min(classes, key=lambda each: LEVELS[each], default=EncodeClass.INTERACTIVE),
    )
