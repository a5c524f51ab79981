"""What must not be in the store when nothing is asked."""

from triptych_common.protocol.store import StoreStats

NAMES = (
    "num_reservations", "num_pins", "num_watches", "writing_num_bytes", "pinned_num_bytes",
    "abandoned_num_bytes",
)  # fmt: skip


def store_leftovers(stats: StoreStats) -> dict[str, int]:
    """By name, zeros included."""
    return {f"store {name}": getattr(stats, name) for name in NAMES}
