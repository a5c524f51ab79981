"""Transfer as a span of each request that waits for it, from its order to its result.

A short answer can end before the agent's report is read. The request has left the transfer then, and gets its
span all the same: `TransferTraces` keeps the requests that left each order.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from triptych_common.protocol.transfers import TransferCompleted
from triptych_common.telemetry import record_span
from triptych_gateway.encode.item_wait import ItemWait
from triptych_gateway.transfers.transfer_table import Transfer

MAX_LEFT = 1024  # orders; the oldest without a report are forgotten


@dataclass(slots=True)
class _Left:
    transfer: Transfer  # as it was
    traceparents: list[str | None] = field(default_factory=list)


class TransferTraces:
    """Requests that left a running order, by `transfer_id`."""

    def __init__(self) -> None:
        self._left: LRUCache[str, _Left] = LRUCache(MAX_LEFT)

    def note_left(self, transfer: Transfer, item_waits: Iterable[ItemWait]) -> None:
        """Note requests that wait for the running order no more."""
        if transfer.transfer_id is not None:
            left = self._left.setdefault(transfer.transfer_id, _Left(replace(transfer, request_ids=set())))
            left.traceparents += [each.traceparent for each in item_waits]

    def find_left(self, transfer_id: str) -> Transfer | None:
        """Return the transfer as it was when the first request left it, or None."""
        left = self._left.get(transfer_id)
        return None if left is None else left.transfer

    def record(
        self,
        transfer: Transfer,
        item_waits: Iterable[ItemWait],
        now: float,
        *,
        completed: TransferCompleted | None = None,
        failure: str | None = None,
    ) -> None:
        """Record the end of the running order for the requests that wait or have left.

        Args:
            now: monotonic seconds.
            completed: the agent's report; or:
            failure: the failure's kind.
        """
        left = self._left.pop(transfer.transfer_id or "", None)
        end_ns = time.time_ns()
        attributes = _attributes(transfer, completed)
        traceparents = [each.traceparent for each in item_waits]
        traceparents += [] if left is None else left.traceparents
        for traceparent in traceparents:
            record_span(
                "gateway.transfer",
                end_ns - round((now - transfer.ordered_at) * 1e9),
                end_ns,
                traceparent=traceparent,
                attributes=attributes,
                error=failure,
            )


def _attributes(transfer: Transfer, completed: TransferCompleted | None) -> dict[str, str | int]:
    attributes: dict[str, str | int] = {
        "triptych.source": transfer.source or "",
        "triptych.target": transfer.target,
        "triptych.reason": transfer.reason.value,
    }
    if completed is not None:
        attributes |= {
            "triptych.num_bytes": completed.num_bytes,
            "triptych.transport": completed.transport.value,
        }
        if completed.transfer_s:
            attributes["triptych.bytes_per_s"] = round(completed.num_bytes / completed.transfer_s)
    return attributes
