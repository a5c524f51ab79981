"""Decision policy: remote or local encode of a request's media. Pure; one object per namespace.

Rules first, then the break-even: the instance encodes when that is predicted to end sooner, with the cost for
the streams there. Two bounds keep the decision from flapping: it begins to help when it is ahead by `MARGIN`,
and ends when it is behind. Before anything was encoded there, the prediction is taken from the encoders'
costs, and must be ahead by `UNMEASURED_MARGIN`.

Exploration: as long as no encode there was measured, a small share of requests goes there, on an idle
instance, where that is predicted to cost little.

An instance that shares compute with the encoders adds no cores and no GPU: as soon as anything
is under way, one encode here is one less there, and the handover is what lets both stages go on at once. So
it helps such encoders when all are idle, where it may save the handover (`namespace_decisions.IdleWays`). On
the same cores it encodes small items also under load, since their handover takes more of these cores than
their encode, as long as no text is computed there.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import Caller
from triptych_gateway.decision.prediction import Prediction

DecisionMode = Literal["auto", "remote", "local"]

MARGIN = 0.03
UNMEASURED_MARGIN = 0.4
EXPLORED_SHARE = 0.03  # of the requests that the break-even decided
EXPLORED_COST = 1.3  # times the better way, at most


class EncodeWay(StrEnum):
    REMOTE = "remote"  # encoders encode; the instance gets metadata
    LOCAL = "local"  # the instance gets the media, and encodes


class DecisionReason(StrEnum):
    """Reasons of a decision; a fixed vocabulary for traces and metrics."""

    TEXT_ONLY = "text_only"
    NO_TOWER = "no_tower"  # no instance of the namespace has one
    FOR_ENCODERS = "for_encoders"  # options that instances do not take; media whose cost no header tells
    FORCED = "forced"  # by the setting
    REQUESTED = "requested"  # by the request's header
    SIZES_KNOWN = "sizes_known"  # encoded before: the store has the tensors, as a rule
    IN_FLIGHT = "in_flight"  # encoders are at all of it already, for other requests
    NO_ENCODER = "no_encoder"  # none is registered, and none was for a while
    ENCODER_RETURNS = "encoder_returns"  # none is registered, and one was lately
    COSTS_UNKNOWN = "costs_unknown"
    BELOW_BREAK_EVEN = "below_break_even"
    PREFIX_COVERED = "prefix_covered"  # the instance has encoded all of it, in the same prompt
    TOO_SMALL = "too_small"  # the handover takes longer than an encode at the instance
    ENCODERS_FAR = "encoders_far"  # they are at another store, and the item's way from there is what counts
    ENCODERS_SLOWER = "encoders_slower"  # they have others' items before it
    SHARED_COMPUTE = "shared_compute"  # with the encoders, and something is under way
    EXPLORATION = "exploration"
    STORED_RESPONSE = "stored_response"  # the request goes on from it: its media are where they are


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """Facts about one request that the rules need."""

    num_items: int
    num_new_items: int  # without sizes, and not in flight
    num_unknown_items: int  # without sizes
    has_tower: bool
    needs_encoder: bool  # options that no instance takes
    has_encoder: bool
    encoder_may_return: bool
    is_predictable: bool = True  # its headers tell what it costs to encode: images alone
    is_stream: bool = True  # a whole answer does not show what it cost
    is_idle: bool = False  # the instance that would encode has nothing to do
    shares_compute: bool = False  # it computes on the encoders' cores, or on their GPU
    shares_cores: bool = False  # on their cores
    is_covered: bool = False  # it has encoded all items before, in the same prompt


@dataclass(frozen=True, slots=True)
class EncodeDecision:
    way: EncodeWay
    reason: DecisionReason
    prediction: Prediction | None = None
    is_alone: bool = False  # nothing else was under way, where compute is shared
    needs_room: bool = False  # it waits at the gateway while its instance has enough of such requests

    @property
    def is_local(self) -> bool:
        return self.way is EncodeWay.LOCAL


def why_local(facts: DecisionFacts, prediction: Prediction) -> DecisionReason:
    if facts.is_covered:
        return DecisionReason.PREFIX_COVERED
    near_cost_s = prediction.remote_cost_s - prediction.transfer_s
    if prediction.transfer_s > 0 and near_cost_s <= prediction.local_cost_s:
        return DecisionReason.ENCODERS_FAR
    return DecisionReason.TOO_SMALL if prediction.queue_s == 0 else DecisionReason.ENCODERS_SLOWER


class DecisionPolicy:
    """Policy with memory of its last decision and its exploration."""

    def __init__(self, mode: DecisionMode) -> None:
        self._mode = mode
        self._is_helping = False
        self._num_decided = 0
        self._num_explored = 0

    def rule(self, facts: DecisionFacts, asked: DecisionMode | None = None) -> EncodeDecision | None:
        """Decide by the rules, without a prediction; None leaves it to `break_even`.

        `asked` is the permitted request's own choice, which replaces the setting.
        """
        remote, local = EncodeWay.REMOTE, EncodeWay.LOCAL
        mode, forced = self._mode, DecisionReason.FORCED
        if asked is not None:
            mode, forced = asked, DecisionReason.REQUESTED
        if not facts.num_items:
            return EncodeDecision(remote, DecisionReason.TEXT_ONLY)
        if not facts.has_tower:
            return EncodeDecision(remote, DecisionReason.NO_TOWER)
        if facts.needs_encoder:
            return EncodeDecision(remote, DecisionReason.FOR_ENCODERS)
        if mode == "local":
            return EncodeDecision(local, forced)
        if not facts.num_unknown_items:
            return EncodeDecision(remote, DecisionReason.SIZES_KNOWN)
        if not facts.has_encoder and not facts.encoder_may_return:
            return EncodeDecision(local, DecisionReason.NO_ENCODER)
        if mode == "remote":
            return EncodeDecision(remote, forced)
        if not facts.has_encoder:
            return EncodeDecision(remote, DecisionReason.ENCODER_RETURNS)
        if not facts.num_new_items:
            return EncodeDecision(remote, DecisionReason.IN_FLIGHT)
        if not facts.is_predictable:
            return EncodeDecision(remote, DecisionReason.FOR_ENCODERS)
        return None

    def break_even(self, facts: DecisionFacts, prediction: Prediction | None) -> EncodeDecision:
        """Decide by the predicted seconds of both ways."""
        if prediction is None:
            return EncodeDecision(EncodeWay.REMOTE, DecisionReason.COSTS_UNKNOWN)
        self._num_decided += 1
        if facts.shares_cores and prediction.is_small:
            return EncodeDecision(EncodeWay.LOCAL, DecisionReason.TOO_SMALL, prediction, needs_room=True)
        if facts.shares_compute:
            return EncodeDecision(EncodeWay.REMOTE, DecisionReason.SHARED_COMPUTE, prediction)
        remote_s, local_s = prediction.remote_cost_s, prediction.local_cost_s
        if not prediction.is_local_measured:
            margin = UNMEASURED_MARGIN
        else:
            margin = 0.0 if self._is_helping else MARGIN
        self._is_helping = local_s < remote_s * (1.0 - margin)
        if self._is_helping:
            return EncodeDecision(EncodeWay.LOCAL, why_local(facts, prediction), prediction)
        if self._may_explore(facts, prediction):
            self._num_explored += 1
            return EncodeDecision(EncodeWay.LOCAL, DecisionReason.EXPLORATION, prediction)
        return EncodeDecision(EncodeWay.REMOTE, DecisionReason.BELOW_BREAK_EVEN, prediction)

    def _may_explore(self, facts: DecisionFacts, prediction: Prediction) -> bool:
        """Return whether to explore: a stream, on an idle instance, predicted to be about as quick."""
        return (
            not prediction.is_local_measured
            and facts.is_stream
            and facts.is_idle
            and self._num_explored + 1 <= EXPLORED_SHARE * self._num_decided
            and prediction.local_cost_s <= EXPLORED_COST * prediction.remote_cost_s
        )


ENCODE_HEADER = "X-Triptych-Encode"
OverrideSetting = Literal["none", "operators", "all"]


class EncodeOverride:
    def __init__(self, allowed: OverrideSetting) -> None:
        """Store the setting; `operators` allows API keys with `operator = true`."""
        self._allowed = allowed

    @property
    def is_possible(self) -> bool:
        """True if some request may override, and so choose `auto` whatever the setting is."""
        return self._allowed != "none"

    def read(self, value: str | None, caller: Caller) -> DecisionMode | None:
        """Return the choice in the header, or None without one.

        Raises:
            RequestError: 400 the choice is unknown; 403 the caller may not choose.
        """
        if value is None:
            return None
        if self._allowed == "none" or (self._allowed == "operators" and not caller.is_operator):
            message = f"this API key may not set {ENCODE_HEADER}"
            raise RequestError(403, "encode_override_not_allowed", message, ENCODE_HEADER)
        for mode in get_args(DecisionMode):
            if value.strip() == mode:
                return mode  # type: ignore[no-any-return]
        message = f"{ENCODE_HEADER} must be auto, remote or local"
        raise RequestError(400, "invalid_value", message, ENCODE_HEADER)


def cannot_encode_here() -> RequestError:
    message = f"{ENCODE_HEADER}: no instance of this model can encode these media"
    return RequestError(400, "encode_override_impossible", message, ENCODE_HEADER)
