"""Costs and policy of one namespace (pure: the simulation uses them unchanged); learning from each answer."""

import time
from dataclasses import dataclass

from triptych_gateway.decision.decision_policy import (
    DecisionFacts,
    DecisionMode,
    DecisionPolicy,
    DecisionReason,
    EncodeDecision,
    EncodeWay,
    why_local,
)
from triptych_gateway.decision.instance_load import InstanceLoad
from triptych_gateway.decision.prediction import CostEstimate, CostKind, Demand, Load, Prediction, predict
from triptych_gateway.decision.serving_costs import LinearCost, ServingCosts

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
    """Measurements of both ways; `now` is in monotonic seconds.

    With shared compute both ways take about the same, and costs of encodes under load do not apply to an idle
    system. So each way is measured as a whole: seconds from the decision to the first token, without those of
    the text, over the rows of the request. Both are tried first, in turn, and the first of these trials do
    not count: an engine's first encodes are slow. Later the way that is not chosen is tried now and then,
    since few trials prove little, and a machine may change; the slower it was, the less often. Nothing is
    gained by keeping to a way, so there is no margin: the quicker one is chosen.
    """

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


MAX_DISTURBED = 0.1  # part of a wait that others' work may be, where the wait is to be learned from


class NamespaceDecisions:
    """Decisions of one namespace; `now` is in monotonic seconds."""

    def __init__(self, mode: DecisionMode) -> None:
        self.costs = ServingCosts()
        self.policy = DecisionPolicy(mode)
        self._idle_ways = IdleWays()

    def decide(self, facts: DecisionFacts, load: Load, demand: Demand, now: float) -> EncodeDecision:
        prediction = predict(self.costs.costs(now), load, demand)
        if prediction is not None and facts.shares_compute and facts.is_idle and prediction.queue_s == 0:
            return self._decide_alone(facts, prediction, demand, now)
        return self.policy.break_even(facts, prediction)

    def _decide_alone(
        self, facts: DecisionFacts, prediction: Prediction, demand: Demand, now: float
    ) -> EncodeDecision:
        """Decide on an idle system with shared compute, by the measured times of both ways."""
        new_rows = demand.num_rows - demand.num_rows_here
        local_share = new_rows / demand.num_rows if demand.num_rows > 0 else 1.0
        choice = self._idle_ways.choose(
            demand.num_rows, now, local_share=local_share, may_try=facts.is_stream
        )
        if choice.is_trial:
            reason = DecisionReason.EXPLORATION
        elif choice.way is EncodeWay.LOCAL:
            reason = why_local(facts, prediction)
        else:
            reason = DecisionReason.BELOW_BREAK_EVEN
        return EncodeDecision(choice.way, reason, prediction, is_alone=True)

    def text_estimate(self, kind: CostKind, num_text_tokens: float, now: float) -> CostEstimate:
        text_s = self._text_s(num_text_tokens, now)
        return CostEstimate(
            kind, now, 0.0, num_text_tokens, text_s, 0.0, text_s, is_measured=kind is CostKind.TEXT
        )

    def estimate(self, decision: EncodeDecision, demand: Demand, now: float) -> CostEstimate:
        prediction, num_rows, num_tokens = decision.prediction, demand.num_rows, demand.num_text_tokens
        text_s = self._text_s(num_tokens, now)
        if decision.is_local:
            work_s = 0.0 if prediction is None else prediction.local_work_s
            is_new = (
                demand.num_rows_here == 0 and num_rows > 0
            )  # 0: an image whose rows cannot be guessed yet
            return CostEstimate(
                CostKind.LOCAL, now, num_rows, num_tokens, text_s, 0.0, work_s,
                is_measured=is_new, is_alone=decision.is_alone,
            )  # fmt: skip
        if prediction is None:
            return CostEstimate(CostKind.REMOTE, now, num_rows, num_tokens, text_s)
        return CostEstimate(
            CostKind.REMOTE, now, num_rows, num_tokens, text_s, prediction.arrive_s, prediction.after_s,
            is_measured=prediction.queue_s == 0 and num_rows > 0, is_alone=decision.is_alone,
        )  # fmt: skip

    def on_first_token(
        self, estimate: CostEstimate, busy_s: float, disturbed_s: float, waited_s: float, now: float
    ) -> None:
        """Learn from a stream's first token, `waited_s` after the request was sent, or after the decision for
        `REMOTE`. Others' work there was `busy_s` before it and `disturbed_s` since.
        """
        if not estimate.is_measured or busy_s + disturbed_s > MAX_DISTURBED * waited_s:
            return
        match estimate.kind:
            case CostKind.TEXT:
                self.costs.on_text_answer(estimate.num_text_tokens, waited_s - busy_s, now)
            case CostKind.LOCAL:
                self._observe_alone(EncodeWay.LOCAL, estimate, now)
                self.costs.on_local_answer(estimate.num_rows, waited_s - busy_s - estimate.text_s, now)
            case CostKind.REMOTE:
                self._observe_alone(EncodeWay.REMOTE, estimate, now)
                self.costs.on_answer(
                    estimate.num_rows, waited_s - max(estimate.encode_s, estimate.text_s), now
                )
            case _:
                pass

    def _observe_alone(self, way: EncodeWay, estimate: CostEstimate, now: float) -> None:
        if estimate.is_alone:
            self._idle_ways.observe(way, estimate.num_rows, now - estimate.decided_at - estimate.text_s, now)

    def _text_s(self, num_text_tokens: float, now: float) -> float:
        prefill = self.costs.costs(now).prefill
        return 0.0 if prefill is None else prefill.seconds(num_text_tokens)


class Answering:
    """Answer of one instance to a request, from which nothing is learned. `end` must follow."""

    def on_first_token(self, *, is_stream: bool) -> None:
        """Record the beginning of the answer; one that is no stream has ended with it."""

    def end(self) -> None:
        """End the request in any way, at any time."""


class LearnedAnswering(Answering):
    """Answer of one instance, counted as work before it and measured for later predictions."""

    def __init__(
        self, load: InstanceLoad, namespace: NamespaceDecisions | None, instance: str, estimate: CostEstimate
    ) -> None:
        self._load, self._namespace = load, namespace
        self._is_text = estimate.kind in (CostKind.TEXT, CostKind.SIZES_KNOWN)
        if self._is_text:
            load.begin_text(instance)
        self._instance, self._estimate = instance, estimate
        self._sent_at = time.monotonic()
        is_remote = estimate.kind is CostKind.REMOTE
        self._since = estimate.decided_at if is_remote else self._sent_at
        due_at = self._since + estimate.encode_s
        self._busy_s = load.work_ahead(instance, self._sent_at).busy_s(max(0.0, due_at - self._sent_at))
        self._work_id: int | None = load.begin_work(instance, due_at, estimate.work_s)
        self._total_s = load.total_work_s(instance)
        self._is_streaming = False

    def on_first_token(self, *, is_stream: bool) -> None:
        now = time.monotonic()
        self._end_work(now)
        if not is_stream:
            return
        self._is_streaming = True
        self._load.begin_stream(self._instance)
        if self._namespace is not None:
            disturbed_s = self._load.total_work_s(self._instance) - self._total_s
            self._namespace.on_first_token(self._estimate, self._busy_s, disturbed_s, now - self._since, now)

    def end(self) -> None:
        self._end_work(time.monotonic())
        if self._is_streaming:
            self._is_streaming = False
            self._load.end_stream(self._instance)
        if self._is_text:
            self._is_text = False
            self._load.end_text(self._instance)

    def _end_work(self, now: float) -> None:
        if self._work_id is not None:
            self._load.end_work(self._instance, self._work_id, now)
            self._work_id = None
        if self._estimate.place is not None:
            self._estimate.place.leave()
