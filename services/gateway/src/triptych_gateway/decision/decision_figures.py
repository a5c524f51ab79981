"""Figures behind a decision, for the trace: a fixed set of names. Pure."""

from triptych_gateway.decision.decision_policy import DecisionFacts, EncodeDecision
from triptych_gateway.decision.prediction import Demand, Load
from triptych_gateway.tracing import attributes


def decision_figures(
    decision: EncodeDecision,
    facts: DecisionFacts | None,
    demand: Demand | None = None,
    load: Load | None = None,
) -> dict[str, float | int | bool]:
    """Return the figures by attribute, without those that the decision did not need."""
    found: dict[str, float | int | bool] = {}
    if facts is not None:
        found |= {
            attributes.DECISION_NUM_NEW_ITEMS: facts.num_new_items,
            attributes.DECISION_NUM_UNKNOWN_ITEMS: facts.num_unknown_items,
            attributes.DECISION_HAS_ENCODER: facts.has_encoder,
            attributes.DECISION_HAS_TOWER: facts.has_tower,
            attributes.DECISION_SHARES_COMPUTE: facts.shares_compute,
        }
    if demand is not None:
        found |= {
            attributes.DECISION_NUM_ROWS: demand.num_rows,
            attributes.DECISION_NUM_ROWS_HERE: demand.num_rows_here,
        }
    if load is not None:
        found |= {
            attributes.DECISION_NUM_ENCODERS: load.queue.num_encoders,
            attributes.DECISION_NUM_QUEUED_ITEMS: load.queue.num_items,
            attributes.DECISION_NUM_STREAMS: load.num_streams,
        }
    if decision.prediction is not None:
        found |= {
            attributes.DECISION_QUEUE_S: decision.prediction.queue_s,
            attributes.DECISION_ENCODE_S: decision.prediction.encode_s,
            attributes.DECISION_TRANSFER_S: decision.prediction.transfer_s,
            attributes.DECISION_LOCAL_WORK_S: decision.prediction.local_work_s,
            attributes.DECISION_IS_LOCAL_MEASURED: decision.prediction.is_local_measured,
        }
    return found
