"""NamespaceDecisions: costs and policy of one namespace. Pure: the simulation uses it unchanged."""

from triptych_gateway.decision.courses import Course, CourseKind
from triptych_gateway.decision.decision_policy import (
    DecisionFacts,
    DecisionMode,
    DecisionPolicy,
    DecisionReason,
    EncodeDecision,
    EncodeWay,
    why_local,
)
from triptych_gateway.decision.idle_ways import IdleWays
from triptych_gateway.decision.prediction import Demand, Load, Prediction, predict
from triptych_gateway.decision.serving_costs import ServingCosts

MAX_DISTURBED = 0.1  # part of a wait that others' work may be, where the wait is to be learned from


class NamespaceDecisions:
    """Decisions of one namespace; `now` is in monotonic seconds."""

    def __init__(self, mode: DecisionMode) -> None:
        self.costs = ServingCosts()
        self.policy = DecisionPolicy(mode)
        self._idle_ways = IdleWays()

    def decide(self, facts: DecisionFacts, load: Load, demand: Demand, now: float) -> EncodeDecision:
        """Decide where no rule has decided."""
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

    def text_course(self, kind: CourseKind, num_text_tokens: float, now: float) -> Course:
        """Return the course of a request that needs no encode."""
        text_s = self._text_s(num_text_tokens, now)
        return Course(
            kind, now, 0.0, num_text_tokens, text_s, 0.0, text_s, is_measured=kind is CourseKind.TEXT
        )

    def course(self, decision: EncodeDecision, demand: Demand, now: float) -> Course:
        """Return the course of a request that is encoded."""
        prediction, num_rows, num_tokens = decision.prediction, demand.num_rows, demand.num_text_tokens
        text_s = self._text_s(num_tokens, now)
        if decision.is_local:
            work_s = 0.0 if prediction is None else prediction.local_work_s
            is_new = (
                demand.num_rows_here == 0 and num_rows > 0
            )  # 0: an image whose rows cannot be guessed yet
            return Course(
                CourseKind.LOCAL, now, num_rows, num_tokens, text_s, 0.0, work_s,
                is_measured=is_new, is_alone=decision.is_alone,
            )  # fmt: skip
        if prediction is None:
            return Course(CourseKind.REMOTE, now, num_rows, num_tokens, text_s)
        return Course(
            CourseKind.REMOTE, now, num_rows, num_tokens, text_s, prediction.arrive_s, prediction.after_s,
            is_measured=prediction.queue_s == 0 and num_rows > 0, is_alone=decision.is_alone,
        )  # fmt: skip

    def on_first_token(
        self, course: Course, busy_s: float, disturbed_s: float, waited_s: float, now: float
    ) -> None:
        """Learn from a stream's first token, `waited_s` after the request was sent, or after the decision for
        `REMOTE`. Others' work there was `busy_s` before it and `disturbed_s` since.
        """
        if not course.is_measured or busy_s + disturbed_s > MAX_DISTURBED * waited_s:
            return
        match course.kind:
            case CourseKind.TEXT:
                self.costs.on_text_answer(course.num_text_tokens, waited_s - busy_s, now)
            case CourseKind.LOCAL:
                self._observe_alone(EncodeWay.LOCAL, course, now)
                self.costs.on_local_answer(course.num_rows, waited_s - busy_s - course.text_s, now)
            case CourseKind.REMOTE:
                self._observe_alone(EncodeWay.REMOTE, course, now)
                self.costs.on_answer(course.num_rows, waited_s - max(course.encode_s, course.text_s), now)
            case _:
                pass

    def _observe_alone(self, way: EncodeWay, course: Course, now: float) -> None:
        if course.is_alone:
            self._idle_ways.observe(way, course.num_rows, now - course.decided_at - course.text_s, now)

    def _text_s(self, num_text_tokens: float, now: float) -> float:
        prefill = self.costs.costs(now).prefill
        return 0.0 if prefill is None else prefill.seconds(num_text_tokens)
