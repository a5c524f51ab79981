"""IdleWays: the way with the sooner first token on an idle system, as measured. Pure.

With shared compute both ways take about the same, and costs of encodes under load do not apply to an idle
system. So each way is measured as a whole: seconds from the decision to the first token, without those of the
text, over the rows of the request. Both are tried first, in turn, and the first of these trials do not count:
an engine's first encodes are slow. Later the way that is not chosen is tried now and then, since few trials
prove little, and a machine may change; the slower it was, the less often. Nothing is gained by keeping to a
way, so there is no margin: the quicker one is chosen.
"""

from dataclasses import dataclass

from triptych_gateway.decision.decision_policy import EncodeWay
from triptych_gateway.decision.linear_cost import LinearCost

NUM_COLD = 3  # of each way: not counted
NUM_FIRST_TRIALS = NUM_COLD + 6  # of each way
MAX_FIRST_TRIALS = 3 * NUM_FIRST_TRIALS  # of each way: some show nothing, since others came in between
TRIAL_EVERY = 6  # choices at least, afterwards
TRIAL_SHARE = 0.01  # of all seconds, that later trials may cost
MAX_AGE_S = 3600.0


@dataclass(frozen=True, slots=True)
class IdleChoice:
    way: EncodeWay
    is_trial: bool = False  # to learn of it, whatever is known


class IdleWays:
    """Measurements of both ways; `now` is in monotonic seconds."""

    def __init__(self) -> None:
        self._costs = {way: LinearCost(MAX_AGE_S) for way in EncodeWay}
        self._num_seen = dict.fromkeys(EncodeWay, 0)
        self._num_tried = dict.fromkeys(EncodeWay, 0)
        self._seen_at = dict.fromkeys(EncodeWay, float("-inf"))
        self._num_since_trial = 0
        self._spare_s = 0.0  # that a trial may cost

    def choose(
        self, num_rows: float, now: float, *, local_share: float = 1.0, may_try: bool = True
    ) -> IdleChoice:
        """Return the quicker way, or a trial.

        Args:
            local_share: share of the rows that an instance has not encoded before.
            may_try: True if its first token will be seen.
        """
        self._forget_old(now)
        if may_try and (first := self._first_trial()) is not None:
            return self._try(first)
        remote, local = (self._costs[way].line(now) for way in (EncodeWay.REMOTE, EncodeWay.LOCAL))
        if remote is None or local is None:  # trials that showed nothing: others came in between
            self._num_since_trial += 1
            if may_try and self._num_since_trial >= TRIAL_EVERY:
                self._num_since_trial = 0
                return self._try(EncodeWay.LOCAL if local is None else EncodeWay.REMOTE)
            return IdleChoice(EncodeWay.REMOTE)
        seconds = {
            EncodeWay.REMOTE: remote.seconds(num_rows),
            EncodeWay.LOCAL: local.seconds(num_rows) * local_share,
        }
        quicker = min(seconds, key=seconds.__getitem__)  # remote, if they are equal
        other = _other(quicker)
        self._num_since_trial += 1
        self._spare_s += TRIAL_SHARE * seconds[quicker]
        if (
            may_try
            and self._num_since_trial >= TRIAL_EVERY
            and seconds[other] - seconds[quicker] <= self._spare_s
        ):
            self._num_since_trial, self._spare_s = 0, 0.0
            return self._try(other)
        return IdleChoice(quicker)

    def observe(self, way: EncodeWay, num_rows: float, seconds: float, now: float) -> None:
        """Record an undisturbed request on an idle system."""
        self._num_seen[way] += 1
        self._seen_at[way] = now
        if self._num_seen[way] > NUM_COLD:
            self._costs[way].observe(num_rows, max(seconds, 0.0), now)

    def _forget_old(self, now: float) -> None:
        """Forget a way that was not seen for long: it is tried again as at first, with a warm engine."""
        for way in EncodeWay:
            if self._num_seen[way] > NUM_COLD and now - self._seen_at[way] > MAX_AGE_S:
                self._num_seen[way], self._num_tried[way] = NUM_COLD, 0

    def _first_trial(self) -> EncodeWay | None:
        due = [
            way
            for way in EncodeWay
            if self._num_seen[way] < NUM_FIRST_TRIALS and self._num_tried[way] < MAX_FIRST_TRIALS
        ]
        return min(due, key=self._num_tried.__getitem__, default=None)

    def _try(self, way: EncodeWay) -> IdleChoice:
        self._num_tried[way] += 1
        return IdleChoice(way, is_trial=True)


def _other(way: EncodeWay) -> EncodeWay:
    return EncodeWay.LOCAL if way is EncodeWay.REMOTE else EncodeWay.REMOTE
