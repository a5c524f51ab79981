"""Settings by which a consumer of a stream takes entries."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from triptych_common.bus.fair_share import Consumers
from triptych_common.protocol.codec import Envelope

OnDeadLetter = Callable[[Envelope, str], Awaitable[None]]
FindPeers = Callable[[], Awaitable[Consumers]]


@dataclass(frozen=True)
class ConsumerOptions:
    """Settings by which a consumer takes entries.

    Args:
        prefetch: number of entries taken and not acked at most.
        min_idle_ms: take over entries that their consumer has not renewed for this long, and renew its own;
            None: neither (streams with one reader). max_deliveries: an entry delivered more often goes to the
            dead letters; None: no limit. on_dead_letter: called with an entry that is given up for
            `max_deliveries`, before it is moved. find_peers: the living consumers of the group. Entries are
            taken one by one then, and left to those
            that would be done with them sooner.
        num_elsewhere: number of entries of other streams in the reader's hands: they take places too.
        on_room: called when an entry is not outstanding any more.
    """

    prefetch: int = 1
    min_idle_ms: int | None = None
    max_deliveries: int | None = None
    on_dead_letter: OnDeadLetter | None = None
    find_peers: FindPeers | None = None
    num_elsewhere: Callable[[], int] = lambda: 0
    on_room: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise ValueError("prefetch must be at least 1")
