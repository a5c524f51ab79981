"""Where between hosts something can happen, as data for the tests of faults."""

from tests.support.fast.processes.points import HANDLED, RECEIVED, SENDING
from tests.support.fast.scenario import HOSTS, Point
from tests.support.protocol_steps import FABRIC_STEPS, Channel, Occurs, Step

ALWAYS = (
    "order_transfer", "watch_source", "offer", "reserve_target", "accept", "sealed_to_source", "bytes",
    "seal_target", "stored", "unpin_source", "transfer_completed",
)  # fmt: skip
"""Steps of every item that is encoded on one host and used on another, when nothing fails."""

UNREACHED: dict[str, str] = {}
"""Steps that the questions and faults of these tests do not bring about, with the reason."""


def fabric_points() -> list[Point]:
    """Every moment of every step that a process of these tests sees."""
    return [
        Point(each, moment)
        for each in FABRIC_STEPS
        if each.occurs is not Occurs.APART and each.name not in UNREACHED
        for moment in _moments(each)
    ]


def _moments(each: Step) -> list[str]:
    found = [SENDING] if each.sender in HOSTS else []
    if each.channel in (Channel.STREAM, Channel.STORE, Channel.FABRIC):
        return [*found, RECEIVED, HANDLED]
    return [*found, RECEIVED]


def is_always(point: Point) -> bool:
    return point.step.name in ALWAYS
