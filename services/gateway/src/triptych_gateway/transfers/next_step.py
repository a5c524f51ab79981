"""Next step of a waiting transfer. Pure.

the target has the item                     HOLD
attempts left, a source that was not tried  ORDER from it
attempts left, an encode is under way       WAIT: its metadata, or its seal, come
attempts left, none of that                 LOOK_UP where it is now, once after each order that failed
attempts left, and it is nowhere            ENCODE again: near the target at first, then anywhere
no attempt left                             GIVE_UP

The last attempt is not for a place of the directory: an encode can be had instead.
If the target's own prefill_decode misses an item, only an encoder's report counts as its presence, not the
directory's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from triptych_gateway.transfers.item_sources import TransferSource
from triptych_gateway.transfers.transfer_table import Transfer


class StepKind(Enum):
    HOLD = auto()
    ORDER = auto()
    WAIT = auto()
    LOOK_UP = auto()
    ENCODE = auto()
    GIVE_UP = auto()


@dataclass(frozen=True, slots=True)
class TransferStep:
    kind: StepKind
    source: TransferSource | None = None  # ORDER
    near: str | None = None  # ENCODE: the store whose encoders come first; None: any


def next_step(
    transfer: Transfer, sources: Sequence[TransferSource], *, is_encoding: bool, max_attempts: int
) -> TransferStep:
    """Return the next step; `sources` are the best first, with the target itself if it has the item.

    A transfer that nothing has failed of yet encodes nothing: its item is ordered by the request, or by its
    `EncodeNeeded`.
    """
    if any(each.store == transfer.target and (each.is_new or not transfer.is_missed) for each in sources):
        return TransferStep(StepKind.HOLD)
    if transfer.num_attempts >= max_attempts:
        return TransferStep(StepKind.GIVE_UP)
    fresh = [each for each in sources if each.store not in (transfer.target, *transfer.tried)]
    if 0 < transfer.num_attempts == max_attempts - 1:
        fresh = [each for each in fresh if each.is_new]
    if fresh:
        return TransferStep(StepKind.ORDER, fresh[0])
    if is_encoding or not transfer.num_attempts:
        return TransferStep(StepKind.WAIT)
    if not transfer.is_looked_up:
        return TransferStep(StepKind.LOOK_UP)
    return TransferStep(StepKind.ENCODE, near=None if transfer.num_encodes else transfer.target)
