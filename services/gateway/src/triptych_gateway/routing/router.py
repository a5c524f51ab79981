"""Router: the choice of the prefill_decode for a request. Pure; `now` is an argument.

Of those that can serve it, the one that the stage's routing policy chooses: `scheduling`.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import count

from opentelemetry import trace

from triptych_common.protocol.messages import InstanceRecord, Modality, Role, Sharing
from triptych_gateway.metrics import GatewayMetrics
from triptych_gateway.routing.scheduling.candidates import (
    ONLY,
    Candidate,
    Filter,
    Picker,
    RoutingDecision,
    RoutingRequest,
    ScoredCandidate,
    Scorer,
    ServingStage,
    reason_for,
)
from triptych_gateway.routing.scheduling.instance_state import InstanceState, Waiting
from triptych_gateway.routing.scheduling.profiles import (
    BUILT_IN,
    PICKERS,
    SCORERS,
    RoutingProfiles,
    StageProfile,
    make_filter,
    read_profiles,
)
from triptych_gateway.settings import RoutingSettings
from triptych_gateway.tracing import attributes


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    stage: str
    filters: tuple[Filter, ...]
    scorers: tuple[tuple[str, float, Scorer], ...]  # with name and weight, which is above 0
    picker: Picker

    @classmethod
    def of(cls, stage: str, profile: StageProfile) -> "RoutingPolicy":
        return cls(
            stage,
            tuple(make_filter(name, profile.full_above) for name in profile.filters),
            tuple((name, weight, SCORERS[name]) for name, weight in profile.weights.items() if weight),
            PICKERS[profile.picker],
        )

    def decide(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> RoutingDecision:
        """Decide among `candidates`, not empty, each of which could serve the request."""
        kept = candidates
        for each in self.filters:
            kept = [candidate for candidate in kept if each(candidate)] or kept
        if len(candidates) == 1:
            return RoutingDecision(self.stage, ScoredCandidate(kept[0], {}), None, ONLY)
        parts: list[dict[str, float]] = [{} for _ in kept]
        for name, weight, scorer in self.scorers:
            for part, score in zip(parts, scorer(request, kept), strict=True):
                part[name] = weight * score
        scored = [ScoredCandidate(*each) for each in zip(kept, parts, strict=True)]
        chosen = self.picker(scored)
        others = [each for each in scored if each is not chosen]
        runner_up = max(others, key=lambda each: each.total, default=None)
        share = chosen.candidate.prefix_share(request.prompt) if request.is_prompt_read else None
        return RoutingDecision(self.stage, chosen, runner_up, reason_for(chosen, runner_up), share)


SERVING_ROLES = frozenset({Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE})
# They serve requests with raw media, too.
TOWER_ROLES = frozenset({Role.ENCODE_PREFILL_DECODE, Role.ENCODE_PREFILL})
STAGE_ROLES = {
    ServingStage.WHOLE: SERVING_ROLES,
    ServingStage.PREFILL: frozenset({Role.PREFILL, Role.ENCODE_PREFILL}),
    ServingStage.DECODE: frozenset({Role.DECODE}),
}
LANGUAGE_ROLES = frozenset().union(*STAGE_ROLES.values())  # serve some stage
ENCODING_ROLES = frozenset({Role.ENCODE})  # take encode jobs
SHARED = frozenset({Sharing.CORES, Sharing.MPS, Sharing.TIME_SLICES})


class Router:
    """Router with a record of what this gateway sent to each instance and has in flight there."""

    def __init__(
        self,
        suspect_s: float,
        profiles: RoutingProfiles = BUILT_IN,
        report: Callable[[RoutingDecision], None] | None = None,
    ) -> None:
        """Store the profiles; `report` gets each decision, for metrics and traces."""
        self._suspect_s = suspect_s
        self._policies = {stage: RoutingPolicy.of(stage, profiles.of_stage(stage)) for stage in ServingStage}
        self._report = report
        self._states: dict[str, InstanceState] = {}
        self._tick = count(1)

    def pick_instance(
        self,
        records: Iterable[InstanceRecord],
        *,
        model: str,
        namespace_digest: str | None,
        exclude: Set[str],
        now: float,
        needs_tower: bool = False,
        takes: Set[Modality] = frozenset(),
        stage: ServingStage = ServingStage.WHOLE,
        routing: RoutingRequest | None = None,
    ) -> InstanceRecord | None:
        """Return the instance for one request, or for a stage of it, or None.

        Args:
            namespace_digest: only instances of this namespace; None: any (text only).
            exclude: instances that were tried for this request.
            now: monotonic seconds.
            needs_tower: only instances that can encode the request's media themselves.
            takes: only instances that take raw items of these modalities.
            stage: stage of the request at the instance.
            routing: further facts about the request, if any.
        """
        able = [
            record
            for record in records
            if can_serve(record, model, stage)
            and (namespace_digest is None or record.namespace_digest == namespace_digest)
            and record.instance not in exclude
            and (record.role in TOWER_ROLES or not needs_tower)
            and takes <= record.item_limits.keys()
        ]
        if not able:
            return None
        candidates = [self._observed(record, now).as_candidate(record, now) for record in able]
        decision = self._policies[stage].decide(routing or RoutingRequest(model), candidates)
        self._states[decision.record.instance].picked_at = next(self._tick)
        if self._report is not None:
            self._report(decision)
        return decision.record

    def begin_request(self, instance: str, routing: RoutingRequest | None = None, now: float = 0.0) -> None:
        """Record that a request goes to `instance`; its end gets the same `routing`, and with it `now`."""
        self._state_of(instance).begin_request(routing, now)

    def end_request(
        self,
        instance: str,
        routing: RoutingRequest | None = None,
        now: float = 0.0,
        *,
        is_computed: bool = True,
    ) -> None:
        """Record the end of an answer; `is_computed` is False if there was none."""
        self._state_of(instance).end_request(routing, now, is_computed=is_computed)

    def avoid_instance(self, instance: str, now: float) -> None:
        """Avoid `instance` for a while, since it could not be reached."""
        self._state_of(instance).suspect_until = now + self._suspect_s

    def num_in_flight(self, instance: str) -> int:
        known = self._states.get(instance)
        return 0 if known is None else known.num_in_flight

    def num_requests(self, record: InstanceRecord, now: float) -> int:
        """Return the requests in flight at an instance, of all gateways as far as known."""
        return self._observed(record, now).num_requests(now)

    def waiting_at(self, record: InstanceRecord, num_without_items: int, now: float) -> Waiting:
        """Return this gateway's work that waits at an instance for its turn.

        `num_without_items` requests there wait for encoders instead.
        """
        return self._observed(record, now).waiting(record, num_without_items, now)

    def observe(self, records: Iterable[InstanceRecord], now: float) -> None:
        """Record the load that instances announce, after a read of the registry."""
        for record in records:
            if record.role in LANGUAGE_ROLES:
                self._observed(record, now)

    def is_suspect(self, instance: str, now: float) -> bool:
        """Return whether the instance could not be reached a moment ago."""
        known = self._states.get(instance)
        return known is not None and known.suspect_until > now

    def forget_all_but(self, seen: Set[str]) -> None:
        """Drop facts about instances that left the registry, once nothing of theirs runs."""
        for instance in self._states.keys() - seen:
            if not self._states[instance].num_in_flight:
                del self._states[instance]

    def _observed(self, record: InstanceRecord, now: float) -> InstanceState:
        state = self._state_of(record.instance)
        state.observe(record, now)
        return state

    def _state_of(self, instance: str) -> InstanceState:
        state = self._states.get(instance)
        if state is None:
            state = self._states[instance] = InstanceState()
        return state


def can_serve(record: InstanceRecord, model: str, stage: ServingStage = ServingStage.WHOLE) -> bool:
    """Return whether `record` takes this stage of requests for `model` or its LoRA adapter."""
    return (
        record.role in STAGE_ROLES[stage]
        and record.url is not None
        and (record.model == model or model in record.adapters)
        and not record.draining
    )


def unloaded_adapters(before: Iterable[InstanceRecord], after: Iterable[InstanceRecord]) -> set[str]:
    """Return LoRA adapters that a living instance has unloaded, for which no request should wait."""
    living = {(record.instance, record.boot_id): set(record.adapters) for record in after}
    lost: set[str] = set()
    for record in before:
        lost |= set(record.adapters) - living.get((record.instance, record.boot_id), set(record.adapters))
    return lost


def shares_compute(instance: InstanceRecord, encoders: Iterable[InstanceRecord]) -> bool:
    own = instance.compute
    if own is None or own.sharing not in SHARED:
        return False
    others = [record.compute for record in encoders]
    return bool(others) and all(
        each is not None and each.sharing in SHARED and each.gpu == own.gpu for each in others
    )


def open_router(settings: RoutingSettings, metrics: GatewayMetrics) -> Router:
    """Return a router for one gateway that reports its decisions.

    Raises:
        RoutingFileError: the file of routing profiles cannot be used.
    """
    profiles = read_profiles(settings.routing_file)
    return Router(settings.suspect_s, profiles, partial(_report_decision, metrics))


def _report_decision(metrics: GatewayMetrics, decision: RoutingDecision) -> None:
    """Report the choice of an instance, in metrics and in the active span of its request."""
    metrics.routing_decisions.labels(decision.stage, decision.reason).inc()
    if decision.prefix_share is not None:
        metrics.routing_prefix_share.observe(decision.prefix_share)
    active = trace.get_current_span()
    if active.is_recording():
        active.set_attribute(attributes.ROUTING, decision.explanation)
        active.set_attribute(attributes.ROUTING_REASON, decision.reason)
