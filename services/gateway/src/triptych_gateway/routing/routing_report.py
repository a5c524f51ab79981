"""RoutingReport: metrics and traces of the router's decisions."""

from dataclasses import dataclass
from pathlib import Path

from opentelemetry import trace

from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.routing.router import Router
from triptych_gateway.routing.scheduling.decision import RoutingDecision
from triptych_gateway.routing.scheduling.profile_file import read_profiles
from triptych_gateway.tracing import attributes


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Report of one gateway, to the active span: the request's, or its first token's."""

    metrics: GatewayMetrics

    def on_decision(self, decision: RoutingDecision) -> None:
        """Report the choice of an instance."""
        self.metrics.routing_decisions.labels(decision.stage, decision.reason).inc()
        if decision.prefix_share is not None:
            self.metrics.routing_prefix_share.observe(decision.prefix_share)
        active = trace.get_current_span()
        if active.is_recording():
            active.set_attribute(attributes.ROUTING, decision.explanation)
            active.set_attribute(attributes.ROUTING_REASON, decision.reason)


def open_router(suspect_s: float, routing_file: Path | None, metrics: GatewayMetrics) -> Router:
    """Return a router for one gateway that reports its decisions.

    Raises:
        RoutingFileError: the file of routing profiles cannot be used.
    """
    return Router(suspect_s, read_profiles(routing_file), RoutingReport(metrics).on_decision)
