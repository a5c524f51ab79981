"""Metrics of a fabric agent, served on its own port or socket (`docs/reference/metrics.md`)."""

from triptych_common.telemetry.metrics import Metrics

MAX_PEERS = 64
"""Peers that are counted by name; names of stores may change for ever."""


class FabricMetrics:
    """One object per agent, with a registry of its own."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics()
        self._peers: set[str] = set()
        self.orders = metrics.counter(
            "fabric_orders", "Transfers ordered here, by outcome: completed, or why not", ("outcome",)
        )
        self.num_orders = metrics.gauge("fabric_orders_in_hand", "Orders that are not answered yet")
        self.pushes = metrics.counter(
            "fabric_pushes",
            "Entries pushed, by outcome: stored, present (the target had it), or why not",
            ("outcome", "target"),
        )
        self.sent_bytes = metrics.counter(
            "fabric_sent_bytes", "Bytes of entries that targets have stored", ("target", "transport")
        )
        self.transfer_s = metrics.histogram(
            "fabric_transfer_seconds", "An entry's first byte to the target's seal"
        )
        self.receptions = metrics.counter(
            "fabric_receptions",
            "Entries offered by others, by outcome: sealed, present, withdrawn, or why not",
            ("outcome", "source"),
        )
        self.received_bytes = metrics.counter(
            "fabric_received_bytes",
            "Bytes of entries that were received and sealed",
            ("source", "transport"),
        )
        self.reserved_bytes = metrics.gauge(
            "fabric_reserved_bytes", "Bytes reserved for entries of others, and not sealed yet"
        )
        self.links = metrics.gauge(
            "fabric_links", "Connections to agents of targets that are up", ("transport",)
        )
        self.peers = metrics.gauge("fabric_peers", "Connections from agents of sources that are up")
        self.refused = metrics.counter(
            "fabric_refused_connections",
            "Connections refused: key, store, transport, busy, version, other",
            ("reason",),
        )

    def peer(self, store: str) -> str:
        """Label value for another agent's store."""
        if store not in self._peers and len(self._peers) >= MAX_PEERS:
            return "other"
        self._peers.add(store)
        return store
