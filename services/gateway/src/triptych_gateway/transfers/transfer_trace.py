"""A transfer as a span of each request that waits for it: from its order to what it came to."""

import time
from collections.abc import Iterable

from triptych_common.protocol.transfers import TransferCompleted
from triptych_common.telemetry import record_span
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.transfers.transfer_table import Transfer


def record_transfer(
    transfer: Transfer,
    media_waits: Iterable[MediaWait],
    now: float,
    *,
    completed: TransferCompleted | None = None,
    failure: str | None = None,
) -> None:
    """`now`: monotonic seconds. `failure`: its kind; else `completed` is what its agent says."""
    end_ns = time.time_ns()
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
    for media_wait in media_waits:
        record_span(
            "gateway.transfer",
            end_ns - round((now - transfer.ordered_at) * 1e9),
            end_ns,
            traceparent=media_wait.traceparent,
            attributes=attributes,
            error=failure,
        )
