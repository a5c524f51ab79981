"""Prediction: seconds until a request's first token if encoders encode its new items, or an instance. Pure.

    remote   encoders' queue, their encode of the new items, and what is left of their way to the instance's
             store, if that is another one; meanwhile the instance computes the text; then work that is
             before it there; then what follows the encode
    local    work before it at the instance; its text; encode and prefill of all rows there

Encode and prefill overlap when encoders encode: what is left of the rows' prefill afterwards is measured.
When the instance encodes, they add up. A request goes one way as a whole, so items that encoders have made
already are encoded anew there; those of a prompt that it has encoded before are in its prefix cache.

What a way costs others is added to its seconds: `burden`. Work that is known to come later is delayed; each
request that waits now stands for one that will wait behind this one; streams stand still while one encodes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from triptych_gateway.decision.instance_load import LocalPlace, WorkAhead
from triptych_gateway.decision.serving_costs import Costs, Line

STALL_WEIGHT = 0.5  # of a second by which a stream at the instance stands still
WAITING_WEIGHT = 1.0  # of a second by which a request that waits is delayed
MAX_TEXT_DELAY_S = 0.05
"""Wait of a text that comes while an instance encodes a small item, which callers hardly notice; longer where
the item's handover takes longer, as on a slow machine or one with other work."""
BYTES_PER_TOKEN = 4.0  # of text; both ways are taken to have the same, so it matters little


@dataclass(frozen=True, slots=True)
class Demand:
    num_items: int
    num_rows: float  # of all items
    num_new_items: int  # that no encoder has made or is making
    num_new_rows: float
    num_text_tokens: float = 0.0
    num_rows_here: float = 0.0  # of items that the instance has encoded before, in the same prompt


@dataclass(frozen=True, slots=True)
class EncoderQueue:
    """Queue before a request at all encoders of the namespace: items that wait or are being encoded."""

    num_encoders: int
    num_items: int = 0
    num_rows: float = 0.0
    num_requests: int = 0  # that they are for

    @property
    def num_waiting(self) -> int:
        """Number of requests beyond those that are being served."""
        return max(0, self.num_requests - self.num_encoders)


@dataclass(frozen=True, slots=True)
class Load:
    """Load on encoders, instance and links before a request."""

    queue: EncoderQueue
    ahead: WorkAhead = field(default_factory=WorkAhead)  # at the instance for a remote request
    local_ahead: WorkAhead = field(default_factory=WorkAhead)  # at the instance that would encode
    num_streams: int = 0  # there
    num_texts: int = 0  # there: requests that need no encode
    num_held: int = 0  # requests that wait at the gateway for room there
    transfers_s: tuple[float, ...] = ()
    """Seconds per new item from its encoders to the store of the remote request's instance; 0 within one
    store."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted seconds; seconds and burden together are compared."""

    remote_s: float
    local_s: float
    remote_burden_s: float
    local_burden_s: float
    queue_s: float  # the part of `remote_s` before this request's first encode
    encode_s: float  # until the last encode
    after_s: float  # what follows the last item's arrival: the instance's work
    local_work_s: float  # the instance's work, if it encodes
    is_local_measured: bool  # else it was derived from what encoders take
    transfer_s: float = 0.0  # between the last encode and the last item's arrival at the instance's store
    is_small: bool = False  # an instance on the encoders' cores may encode it, which spares them the handover

    @property
    def arrive_s(self) -> float:
        """Seconds until all items are where the instance needs them."""
        return self.encode_s + self.transfer_s

    @property
    def remote_cost_s(self) -> float:
        return self.remote_s + self.remote_burden_s

    @property
    def local_cost_s(self) -> float:
        return self.local_s + self.local_burden_s


def predict(costs: Costs, load: Load, demand: Demand) -> Prediction | None:
    """Predict both ways; None without a known cost of encodes or without an encoder."""
    encode, queue = costs.encode, load.queue
    if encode is None or queue.num_encoders <= 0:
        return None
    queue_s = _queue_s(encode, queue)
    new_s = encode.base_s * demand.num_new_items + encode.per_unit_s * demand.num_new_rows
    encode_s = queue_s + _spread_s(new_s, demand.num_new_items, queue.num_encoders)
    transfer_s = _transfer_s(load.transfers_s, encode_s - queue_s, queue.num_encoders)
    arrive_s = encode_s + transfer_s
    text_s = 0.0 if costs.prefill is None else costs.prefill.seconds(demand.num_text_tokens)
    after_s = 0.0 if costs.after_encode is None else costs.after_encode.seconds(demand.num_rows)
    tower_s = encode.base_s * demand.num_items + encode.per_unit_s * demand.num_rows
    if costs.local is not None:
        local_part_s = costs.local.seconds(demand.num_rows)
    elif costs.prefill is not None:
        local_part_s = tower_s + max(after_s, costs.prefill.per_unit_s * demand.num_rows)
    else:  # as if each item's prefill took what follows the last one's encode
        local_part_s = tower_s + after_s * demand.num_items
    if demand.num_rows > 0:
        local_part_s *= 1.0 - min(demand.num_rows_here / demand.num_rows, 1.0)
    tower_part_s = max(0.0, min(tower_s, local_part_s))
    return Prediction(
        remote_s=max(arrive_s + load.ahead.busy_s(arrive_s), load.ahead.busy_s() + text_s) + after_s,
        local_s=load.local_ahead.busy_s() + text_s + local_part_s,
        remote_burden_s=WAITING_WEIGHT * queue.num_waiting * new_s / queue.num_encoders,
        local_burden_s=load.local_ahead.delay_s(text_s + local_part_s)
        + tower_part_s * (WAITING_WEIGHT * load.local_ahead.num_due + STALL_WEIGHT * load.num_streams),
        queue_s=queue_s,
        encode_s=encode_s,
        after_s=after_s,
        local_work_s=text_s + local_part_s,
        is_local_measured=costs.local is not None,
        transfer_s=transfer_s,
        is_small=_is_small(costs, load, demand, tower_s),
    )


def _is_small(costs: Costs, load: Load, demand: Demand, tower_s: float) -> bool:
    """Return whether items may be encoded where they are needed, on the encoders' cores: no text waits long.

    On the same cores that always takes less CPU time: the handover is spared to this request and to all that
    wait behind it. Streams stand still while the instance encodes, so they must not be more than these.
    """
    if load.num_texts or load.num_streams > 1 + load.local_ahead.num_due + load.num_held:
        return False
    if demand.num_rows <= 0 or tower_s <= 0:  # not known
        return False
    is_quick = tower_s <= MAX_TEXT_DELAY_S * demand.num_items
    return is_quick or _total_s(costs.encode_alone, demand, math.inf) <= _total_s(costs.handover, demand, 0.0)


def _total_s(line: Line | None, demand: Demand, unknown_s: float) -> float:
    """Return the seconds of all items by a line over the rows of one."""
    return unknown_s if line is None else line.base_s * demand.num_items + line.per_unit_s * demand.num_rows


def _queue_s(encode: Line, queue: EncoderQueue) -> float:
    """Return when the encoders are done with their items; those under way count half."""
    if not queue.num_items:
        return 0.0
    all_s = encode.base_s * queue.num_items + encode.per_unit_s * queue.num_rows
    under_way = min(queue.num_items, queue.num_encoders) / queue.num_items
    return all_s * (1.0 - 0.5 * under_way) / queue.num_encoders


def _spread_s(work_s: float, num_items: int, num_encoders: int) -> float:
    """Return the time of work on items that several encoders share, each item undivided."""
    if num_items <= 0:
        return 0.0
    return work_s * math.ceil(num_items / num_encoders) / num_items


def _transfer_s(transfers_s: Sequence[float], work_s: float, num_encoders: int) -> float:
    """Return the seconds from the last encode to the last arrival.

    Transfers go one after the other, while later items are encoded: the last one follows its own encode, and
    the other transfers since the first encode. `work_s` is the time from this request's first encode to the
    end of its last one.
    """
    if not any(transfers_s):
        return 0.0
    first_s = work_s / math.ceil(len(transfers_s) / num_encoders)
    return max(*transfers_s, first_s + sum(transfers_s) - work_s)


class CostKind(StrEnum):
    """Kinds of work before the first token."""

    TEXT = "text"  # prefill alone
    SIZES_KNOWN = "sizes_known"  # likewise: no encode is due
    REMOTE = "remote"  # encoders', then prefill
    LOCAL = "local"  # encode and prefill at the instance


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Predicted seconds of a request's work; 0 where nothing is known."""

    kind: CostKind
    decided_at: float = 0.0  # monotonic seconds
    num_rows: float = 0.0  # that the instance encodes, or gets, and prefills
    num_text_tokens: float = 0.0
    text_s: float = 0.0  # the instance's, for the text
    encode_s: float = 0.0  # until its items are encoded and at its store; the instance's work is due then
    work_s: float = 0.0  # the instance's, before the first token
    is_measured: bool = False  # its first token says what such a request costs
    is_alone: bool = False  # and what its way takes on an idle system, where compute is shared
    place: LocalPlace | None = None  # that it gives back with its first token


def text_tokens(num_bytes: int) -> float:
    return num_bytes / BYTES_PER_TOKEN
