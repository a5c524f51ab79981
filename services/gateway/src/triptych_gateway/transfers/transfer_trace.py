"""A transfer as a span of each request that waits for it: from its order to what it came to.

A short answer can end before the agent's report is read. The request has left the transfer then, and gets its
span all the same: `TransferTraces` keeps who has left which order.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cachetools import LRUCache

from triptych_common.protocol.transfers import TransferCompleted
from triptych_common.telemetry import record_span
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.transfers.transfer_table import Transfer

MAX_LEFT = 1024  # orders; of those that nobody ever reports the oldest are forgotten


@dataclass(slots=True)
class _Left:
    transfer: Transfer  # as it was
    traceparents: list[str | None] = field(default_factory=list)


class TransferTraces:
    """Of the requests that left an order which was under way. By `transfer_id`."""

    def __init__(self) -> None:
        self._left: LRUCache[str, _Left] = LRUCache(MAX_LEFT)

    def note_left(self, transfer: Transfer, media_waits: Iterable[MediaWait]) -> None:
        """They wait for its order no more; nothing is noted of a transfer that is not under way."""
        if transfer.transfer_id is not None:
            left = self._left.setdefault(transfer.transfer_id, _Left(replace(transfer, request_ids=set())))
            left.traceparents += [each.traceparent for each in media_waits]

    def find_left(self, transfer_id: str) -> Transfer | None:
        """The transfer as it was when the first request left it; None: none has, or it is recorded."""
        left = self._left.get(transfer_id)
        return None if left is None else left.transfer

    def record(
        self,
        transfer: Transfer,
        media_waits: Iterable[MediaWait],
        now: float,
        *,
        completed: TransferCompleted | None = None,
        failure: str | None = None,
    ) -> None:
        """The order of `transfer` that is under way has ended; `media_waits`: those that still wait.

        Args:
            now: monotonic seconds.
            completed: what its agent says; or:
            failure: its kind.
        """
        left = self._left.pop(transfer.transfer_id or "", None)
        end_ns = time.time_ns()
        attributes = _attributes(transfer, completed)
        traceparents = [each.traceparent for each in media_waits]
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
