"""Messages about entries that go from one host's store to another's. docs/design/fabric.md describes it.

A gateway orders a transfer from the fabric agent beside the store that has the entries, or will have them;
that agent pushes them and reports the result to the gateways. Bytes of tensors do not travel here.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from triptych_common.protocol.ids import MmHashText, Name
from triptych_common.protocol.item_record import MAX_PIECES
from triptych_common.protocol.messages import EncodeClass, FabricTransport, Message


class TransferOrder(Message):
    """Gateway, or an operator's drain, -> the fabric agent of `source` (`transfers:{instance}`).

    Push these entries to the store `target`, each as soon as it is sealed at `source`. The envelope's
    `ttl_ms` bounds all of it. Orders of the same item for the same target are one transfer.
    """

    transfer_id: Name
    mm_hash: MmHashText  # the item
    entries: tuple[MmHashText, ...] = Field(min_length=1, max_length=MAX_PIECES)  # its own, or its pieces'
    source: Name  # store
    target: Name  # store
    gateway: Name | None = None  # gateway that gets the result, if any
    encode_class: EncodeClass = EncodeClass.INTERACTIVE  # items that callers wait for go first


class TransferFailureKind(StrEnum):
    ABSENT = "absent"  # the source lacks it, and no process writes it there
    WRITER_LOST = "writer_lost"  # its writer at the source ended
    UNREACHABLE = "unreachable"  # the target's agent is not registered, cannot be reached, or went silent
    REFUSED = "refused"  # the target's agent does not let us in, or takes no such entry
    TARGET_FULL = "target_full"  # no space at the target within the deadline
    CORRUPTED = "corrupted"  # the bytes that arrived are not those that were sent
    EXPIRED = "expired"  # the deadline passed before


class TransferCompleted(Message):
    """Fabric agent -> gateway (`encode-results:{instance}`): the target has all entries of the item."""

    transfer_id: Name
    mm_hash: MmHashText
    source: Name
    target: Name
    transport: FabricTransport
    num_bytes: NonNegativeInt  # that crossed the network; 0: the target had them already
    transfer_s: NonNegativeFloat  # from the first byte to the target's last seal


class TransferFailed(Message):
    """Fabric agent -> gateway (`encode-results:{instance}`): the target does not have the item from here."""

    transfer_id: Name
    mm_hash: MmHashText
    source: Name
    target: Name
    kind: TransferFailureKind
    detail: Annotated[str, Field(max_length=500)] = ""  # for people; holds no path, address or secret


class EntryPlace(Message):
    """Place of an entry in the directory: a store that had it when last reported."""

    store: Name
    generation: PositiveInt  # the store's generation then; with another one the entry is gone
    num_bytes: PositiveInt


TRANSFER_MESSAGES: tuple[type[Message], ...] = (TransferOrder, TransferCompleted, TransferFailed)
