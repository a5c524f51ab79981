"""The figures that a decision was made from, for the trace: a fixed set of names. Pure."""

from triptych_gateway.decision.decision_policy import DecisionFacts, EncodeDecision
from triptych_gateway.decision.prediction import Demand, Load

PREFIX = "triptych.decision."


def decision_figures(
    decision: EncodeDecision,
    facts: DecisionFacts | None,
    demand: Demand | None = None,
    load: Load | None = None,
) -> dict[str, float | int | bool]:
    """By attribute. Those that the decision did not need are left out."""
    found: dict[str, float | int | bool] = {}
    if facts is not None:
        found |= {
            "num_new_items": facts.num_new_items,
            "num_unknown_items": facts.num_unknown_items,
            "has_encoder": facts.has_encoder,
            "has_tower": facts.has_tower,
            "shares_compute": facts.shares_compute,
        }
    if demand is not None:
        found |= {"num_rows": demand.num_rows, "num_rows_here": demand.num_rows_here}
    if load is not None:
        found |= {
            "num_encoders": load.queue.num_encoders,
            "num_queued_items": load.queue.num_items,
            "num_streams": load.num_streams,
        }
    if decision.prediction is not None:
        found |= {
            "queue_s": decision.prediction.queue_s,
            "encode_s": decision.prediction.encode_s,
            "local_work_s": decision.prediction.local_work_s,
            "is_local_measured": decision.prediction.is_local_measured,
        }
    return {PREFIX + name: value for name, value in found.items()}
