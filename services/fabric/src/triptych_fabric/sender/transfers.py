"""Transfers: joins orders of one item for one receiver, so that its entries are sent once.

    order ─▶ transfer of (item, receiver) ─▶ a push for each entry ─▶ result to every order's gateway

Each order has its own deadline. A transfer ends with its last order, or when its entries have arrived.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from triptych_common.domain.fair_queue import LEVELS
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.transfers import (
    TransferCompleted,
    TransferFailed,
    TransferFailureKind,
    TransferOrder,
)
from triptych_common.telemetry.logs import get_logger
from triptych_common.telemetry.tracing import span, traceparent_of
from triptych_fabric.local_store import LocalStore
from triptych_fabric.metrics import FabricMetrics
from triptych_fabric.sender.links import OutgoingLinks
from triptych_fabric.sender.push import EntryPush, Pushed
from triptych_fabric.wire.frames import EntryFailedError

log = get_logger(__name__)

Result = TransferCompleted | TransferFailed
OnResult = Callable[["PlacedOrder", Result], None]


@dataclass(eq=False)
class PlacedOrder:
    """An order with its delivery; `done` acknowledges it."""

    order: TransferOrder
    deadline: float  # monotonic second
    traceparent: str | None
    done: Callable[[], None] = lambda: None
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class _Transfer:
    mm_hash: str
    receiver: str
    encode_class: EncodeClass
    orders: dict[str, PlacedOrder] = field(default_factory=dict)
    pushes: dict[str, EntryPush] = field(default_factory=dict)
    tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    pushed: list[Pushed] = field(default_factory=list)


class TransferTable:
    """All transfers of an agent; `on_result` is called once per answered order."""

    def __init__(
        self,
        store: LocalStore,
        links: OutgoingLinks,
        metrics: FabricMetrics,
        group: asyncio.TaskGroup,
        on_result: OnResult,
    ) -> None:
        self._store = store
        self._links = links
        self._metrics = metrics
        self._group = group
        self._on_result = on_result
        self._transfers: dict[tuple[str, str], _Transfer] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_orders(self) -> int:
        return sum(len(each.orders) for each in self._transfers.values())

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def add(self, placed: PlacedOrder) -> None:
        """Start or join a transfer; an order with a known id replaces the earlier one."""
        order = placed.order
        if order.source != self._store.name or order.target == order.source:
            self._answer(placed, _failed(placed, TransferFailureKind.REFUSED, "it is for another agent"))
            return
        if placed.deadline <= time.monotonic():
            self._answer(placed, _failed(placed, TransferFailureKind.EXPIRED, "it came too late"))
            return
        key = (order.mm_hash, order.target)
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._transfers[key] = _Transfer(order.mm_hash, order.target, order.encode_class)
            self._idle.clear()
        elif LEVELS[order.encode_class] < LEVELS[transfer.encode_class]:
            transfer.encode_class = order.encode_class
            for push in transfer.pushes.values():
                push.raise_class(order.encode_class)
        earlier = transfer.orders.pop(order.transfer_id, None)
        if earlier is not None:
            earlier.stop_timer()
            earlier.done()
        transfer.orders[order.transfer_id] = placed
        loop = asyncio.get_running_loop()
        left_s = placed.deadline - time.monotonic()
        placed.timer = loop.call_later(left_s, self._on_expired, transfer, placed)
        for mm_hash in order.entries:
            if mm_hash not in transfer.pushes:
                push = transfer.pushes[mm_hash] = self._new_push(transfer, mm_hash)
                transfer.tasks.add(self._group.create_task(self._run(transfer, push, placed)))

    def fail_all(self, kind: TransferFailureKind, detail: str) -> None:
        """Answer every order with a failure, because the agent is ending."""
        for transfer in list(self._transfers.values()):
            self._fail(transfer, kind, detail)

    async def _run(self, transfer: _Transfer, push: EntryPush, placed: PlacedOrder) -> None:
        """Run one push in the trace of the order that started it."""
        metrics, receiver = self._metrics, self._metrics.peer(transfer.receiver)
        attributes = {
            "triptych.mm_hash": push.mm_hash,
            "triptych.transfer_id": placed.order.transfer_id,
            "triptych.source": self._store.name,
            "triptych.target": transfer.receiver,
            "triptych.transport": self._links.transport_to(transfer.receiver).value,
        }
        try:
            with span("fabric.transfer", traceparent=placed.traceparent, attributes=attributes) as recorded:
                pushed = await self._push(transfer, push, traceparent_of(recorded))
                transfer_s = pushed.ended_at - pushed.began_at
                recorded.set_attribute("triptych.transport", pushed.transport.value)
                recorded.set_attribute("triptych.num_bytes", pushed.num_bytes)
                recorded.set_attribute("triptych.transfer_s", transfer_s)
                if transfer_s > 0:
                    recorded.set_attribute("triptych.bytes_per_s", pushed.num_bytes / transfer_s)
        except EntryFailedError as error:
            metrics.pushes.labels(error.kind.value, receiver).inc()
            log.info(
                "entry not transferred", mm_hash=push.mm_hash, target=transfer.receiver, error=str(error)
            )
            self._fail(transfer, error.kind, error.detail)
        else:
            metrics.pushes.labels("stored" if pushed.num_bytes else "present", receiver).inc()
            metrics.sent_bytes.labels(receiver, pushed.transport.value).inc(pushed.num_bytes)
            if pushed.num_bytes:
                metrics.transfer_s.observe(transfer_s)
            transfer.pushed.append(pushed)
            if len(transfer.pushed) == len(transfer.pushes):
                self._complete(transfer)

    async def _push(self, transfer: _Transfer, push: EntryPush, traceparent: str | None) -> Pushed:
        """Push until the last deadline of the transfer's orders, including orders that joined later.

        After a lost link the push continues over another transport, if there is one.
        """
        while True:
            deadline = _last_deadline(transfer)
            try:
                return await push.run(deadline, traceparent)
            except EntryFailedError as error:
                has_time = error.kind is TransferFailureKind.EXPIRED and _last_deadline(transfer) > deadline
                has_way = error.kind is TransferFailureKind.UNREACHABLE and push.has_lost_link
                if not has_time and not (has_way and self._links.has_other_way(transfer.receiver)):
                    raise
            push = transfer.pushes[push.mm_hash] = self._new_push(transfer, push.mm_hash)

    def _new_push(self, transfer: _Transfer, mm_hash: str) -> EntryPush:
        return EntryPush(mm_hash, transfer.receiver, self._store, self._links, transfer.encode_class)

    def _complete(self, transfer: _Transfer) -> None:
        sent = [each for each in transfer.pushed if each.num_bytes]
        began_at = min((each.began_at for each in sent), default=0.0)
        ended_at = max((each.ended_at for each in sent), default=0.0)
        for placed in self._end(transfer):
            completed = TransferCompleted(
                **_names(placed),
                transport=transfer.pushed[-1].transport,
                num_bytes=sum(each.num_bytes for each in sent),
                transfer_s=max(0.0, ended_at - began_at),
            )
            self._answer(placed, completed)

    def _fail(self, transfer: _Transfer, kind: TransferFailureKind, detail: str) -> None:
        orders = self._end(transfer)
        for task in transfer.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        for placed in orders:
            self._answer(placed, _failed(placed, kind, detail))

    def _on_expired(self, transfer: _Transfer, placed: PlacedOrder) -> None:
        if transfer.orders.get(placed.order.transfer_id) is not placed:
            return
        detail = "the deadline of the order has passed"
        if len(transfer.orders) == 1:
            self._fail(transfer, TransferFailureKind.EXPIRED, detail)
        else:
            del transfer.orders[placed.order.transfer_id]
            self._answer(placed, _failed(placed, TransferFailureKind.EXPIRED, detail))

    def _end(self, transfer: _Transfer) -> list[PlacedOrder]:
        """Remove the transfer; returns its orders, once."""
        key = (transfer.mm_hash, transfer.receiver)
        if self._transfers.get(key) is transfer:
            del self._transfers[key]
        if not self._transfers:
            self._idle.set()
        orders = list(transfer.orders.values())
        transfer.orders.clear()
        return orders

    def _answer(self, placed: PlacedOrder, result: Result) -> None:
        placed.stop_timer()
        outcome = "completed" if isinstance(result, TransferCompleted) else result.kind.value
        self._metrics.orders.labels(outcome).inc()
        self._on_result(placed, result)


def _last_deadline(transfer: _Transfer) -> float:
    return max((each.deadline for each in transfer.orders.values()), default=0.0)


def _names(placed: PlacedOrder) -> dict[str, Any]:
    """Fields that an order and its result have in common."""
    return placed.order.model_dump(include={"transfer_id", "mm_hash", "source", "target"})


def _failed(placed: PlacedOrder, kind: TransferFailureKind, detail: str) -> TransferFailed:
    return TransferFailed(**_names(placed), kind=kind, detail=detail[:500])
