"""Order of one transfer, made from the requests that wait for it. Pure."""

from collections.abc import Iterable
from uuid import uuid4

from triptych_common.domain.fair_turns import LEVELS
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import EncodeClass
from triptych_common.protocol.transfers import TransferOrder
from triptych_gateway.encode.media_wait import MediaWait
from triptych_gateway.transfers.transfer_table import Transfer


def transfer_order(
    transfer: Transfer,
    source: str,
    entries: tuple[MmHash, ...],
    gateway: str,
    media_waits: Iterable[MediaWait],
) -> TransferOrder:
    """Return the order to the agent of store `source`, of the highest class among `media_waits`."""
    classes = (each.lane.encode_class for each in media_waits)
    return TransferOrder(
        transfer_id=f"transfer-{uuid4().hex}",
        mm_hash=transfer.mm_hash,
        entries=entries,
        source=source,
        target=transfer.target,
        gateway=gateway,
        encode_class=min(classes, key=lambda each: LEVELS[each], default=EncodeClass.INTERACTIVE),
    )
