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

from triptych_gateway.decision.instance_load import WorkAhead
from triptych_gateway.decision.linear_cost import Line
from triptych_gateway.decision.serving_costs import Costs

STALL_WEIGHT = 0.5  # of a second by which a stream at the instance stands still
WAITING_WEIGHT = 1.0  # of a second by which a request that waits is delayed
HANDOVER_S = 0.02
"""CPU seconds that the handover of a small image takes, in all processes together: some 20 ms of the 40 to 50
of a 224 x 224 image through an encoder are spent neither on its encode nor on its prompt."""
SMALL_S = 0.05
"""An encode as predicted, at most, for which `HANDOVER_S` counts: under load encoders report two to three
times their CPU time."""
BYTES_PER_TOKEN = 4.0  # of text; both ways are taken to have the same, so it matters little


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of one request on encoders and instance."""

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
    is_handover_dearer: bool = False  # than the encode: an instance on the encoders' cores spares them work

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
        is_handover_dearer=_is_handover_dearer(load, demand, tower_s),
    )


def _is_handover_dearer(load: Load, demand: Demand, tower_s: float) -> bool:
    """Return whether small items cost less where they are needed, on the same cores, and no text is there.

    What the handover takes is spared to this request and to all that wait behind it; streams stand still
    while the instance encodes.
    """
    if load.num_texts or not 0 < tower_s <= SMALL_S * demand.num_items or demand.num_rows <= 0:
        return False
    handover_s = HANDOVER_S * demand.num_items
    num_waiting = load.local_ahead.num_due + load.num_held
    return STALL_WEIGHT * load.num_streams * tower_s <= handover_s * (1 + num_waiting)


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
