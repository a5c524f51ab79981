"""Metrics of a fabric agent, served on its own port or socket (`docs/reference/metrics.md`)."""

from triptych_common.telemetry.metrics import Metrics

MAX_PEERS = 64
"""Maximum number of peers counted by name, since stores' names may change without end."""


class FabricMetrics:
    def __init__(self) -> None:
        self.metrics = metrics = Metrics()
        self._peers: set[str] = set()
        self.orders = metrics.counter(
            "fabric_orders",
            "Transfers ordered here, by outcome: completed, or the kind of failure",
            ("outcome",),
        )
        self.num_orders = metrics.gauge("fabric_orders_in_hand", "Orders not answered yet")
        self.pushes = metrics.counter(
            "fabric_pushes",
            "Entries pushed, by outcome: stored, present (the target had it), or the kind of failure",
            ("outcome", "target"),
        )
        self.sent_bytes = metrics.counter(
            "fabric_sent_bytes", "Bytes of entries that targets have stored", ("target", "transport")
        )
        self.transfer_s = metrics.histogram(
            "fabric_transfer_seconds", "Seconds from an entry's first byte to the target's seal"
        )
        self.receptions = metrics.counter(
            "fabric_receptions",
            "Entries offered by others, by outcome: sealed, present, withdrawn, or the kind of failure",
            ("outcome", "source"),
        )
        self.received_bytes = metrics.counter(
            "fabric_received_bytes", "Bytes of entries received and sealed", ("source", "transport")
        )
        self.reserved_bytes = metrics.gauge(
            "fabric_reserved_bytes", "Bytes reserved for other agents' entries and not sealed yet"
        )
        self.links = metrics.gauge("fabric_links", "Open connections to targets' agents", ("transport",))
        self.peers = metrics.gauge("fabric_peers", "Open connections from sources' agents")
        self.refused = metrics.counter(
            "fabric_refused_connections",
            "Connections refused, by reason: key, store, transport, busy, version, other",
            ("reason",),
        )

    def peer(self, store: str) -> str:
        """Label value for another agent's store."""
        if store not in self._peers and len(self._peers) >= MAX_PEERS:
            return "other"
        self._peers.add(store)
        return store
