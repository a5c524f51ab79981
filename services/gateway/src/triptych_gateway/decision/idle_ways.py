"""IdleWays: which way gives the first token sooner when nothing else is under way, as it was seen. Pure.

Where an instance computes on what the encoders compute on, both ways take about the same, and what encodes
cost under load says nothing of an idle system. So each way is measured as a whole: seconds from the decision
to the first token, without those of the text, over the rows of the request. Both are tried first, in turn;
later the one that is not chosen is tried now and then, since a machine may change.
"""

from triptych_gateway.decision.decision_policy import EncodeWay
from triptych_gateway.decision.linear_cost import LinearCost

NUM_FIRST_TRIALS = 6  # of each way
MAX_FIRST_TRIALS = 18  # of each way: some of them show nothing, since others came in between
TRIAL_EVERY = 33  # choices, afterwards
MARGIN = 0.03  # by which the other way must be ahead
MAX_AGE_S = 3600.0


class IdleWays:
    """`now`: monotonic seconds."""

    def __init__(self) -> None:
        self._costs = {way: LinearCost(MAX_AGE_S) for way in EncodeWay}
        self._num_seen = dict.fromkeys(EncodeWay, 0)
        self._num_tried = dict.fromkeys(EncodeWay, 0)
        self._num_chosen = 0
        self._preferred = EncodeWay.REMOTE

    def choose(self, num_rows: float, now: float, *, local_share: float = 1.0) -> EncodeWay:
        """The way that was quicker. `local_share`: of the rows, that an instance has not encoded before."""
        lines = {way: cost.line(now) for way, cost in self._costs.items()}
        remote, local = lines[EncodeWay.REMOTE], lines[EncodeWay.LOCAL]
        if remote is None or local is None:
            return EncodeWay.REMOTE
        seconds = {
            EncodeWay.REMOTE: remote.seconds(num_rows),
            EncodeWay.LOCAL: local.seconds(num_rows) * local_share,
        }
        if seconds[_other(self._preferred)] < seconds[self._preferred] * (1.0 - MARGIN):
            self._preferred = _other(self._preferred)
        return self._preferred

    def trial(self) -> EncodeWay | None:
        """The way that this request shall try, whatever is known; None: no trial is due."""
        due = [
            way
            for way in EncodeWay
            if self._num_seen[way] < NUM_FIRST_TRIALS and self._num_tried[way] < MAX_FIRST_TRIALS
        ]
        if due:
            way = min(due, key=self._num_tried.__getitem__)
        else:
            self._num_chosen += 1
            if self._num_chosen % TRIAL_EVERY:
                return None
            way = _other(self._preferred)
        self._num_tried[way] += 1
        return way

    def observe(self, way: EncodeWay, num_rows: float, seconds: float, now: float) -> None:
        """A request that came to an idle system, and that nothing disturbed."""
        self._costs[way].observe(num_rows, max(seconds, 0.0), now)
        self._num_seen[way] += 1


def _other(way: EncodeWay) -> EncodeWay:
    return EncodeWay.LOCAL if way is EncodeWay.REMOTE else EncodeWay.REMOTE
