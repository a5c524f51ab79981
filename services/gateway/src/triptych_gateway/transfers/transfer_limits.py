"""Limits of a transfer: how long it is waited for, and its number of attempts."""

from dataclasses import dataclass

PREDICTED_TIMES = 3.0  # times the predicted duration, after which a transfer counts as silent
MAX_EXTENSIONS = 4  # extensions for an agent that is alive: it may wait for room at the target
RETRY_S = (0.0, 0.25, 1.0)  # before what follows the first failure, the second, and later ones


@dataclass(frozen=True, slots=True)
class TransferLimits:
    max_attempts: int  # of one item to one store
    grace_s: float  # besides `PREDICTED_TIMES`
    publish_timeout_s: float
