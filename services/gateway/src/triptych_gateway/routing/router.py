"""Router: the choice of the prefill_decode for a request. Pure; `now` is an argument.

Of those that can serve it, the one that the stage's routing policy chooses: `scheduling`.
"""

from collections.abc import Callable, Iterable, Set
from itertools import count

from triptych_common.protocol.messages import InstanceRecord, Modality, Role, Sharing
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.scheduling.decision import RoutingDecision
from triptych_gateway.routing.scheduling.instance_state import InstanceState
from triptych_gateway.routing.scheduling.policy import RoutingPolicy
from triptych_gateway.routing.scheduling.profiles import BUILT_IN, RoutingProfiles
from triptych_gateway.routing.serving_stage import ServingStage as ServingStage

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

    def begin_request(self, instance: str, routing: RoutingRequest | None = None) -> None:
        """Record that a request goes to `instance`; its end gets the same `routing`."""
        self._state_of(instance).begin_request(routing)

    def end_request(
        self, instance: str, routing: RoutingRequest | None = None, *, is_computed: bool = True
    ) -> None:
        """Record the end of an answer; `is_computed` is False if there was none."""
        self._state_of(instance).end_request(routing, is_computed=is_computed)

    def avoid_instance(self, instance: str, now: float) -> None:
        """Avoid `instance` for a while, since it could not be reached."""
        self._state_of(instance).suspect_until = now + self._suspect_s

    def num_in_flight(self, instance: str) -> int:
        known = self._states.get(instance)
        return 0 if known is None else known.num_in_flight

    def num_requests(self, record: InstanceRecord, now: float) -> int:
        """Return the requests in flight at an instance, of all gateways as far as known."""
        return self._observed(record, now).num_requests(now)

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
    """Return whether all `encoders` share cores or GPU with `instance`."""
    own = instance.compute
    if own is None or own.sharing not in SHARED:
        return False
    others = [record.compute for record in encoders]
    return bool(others) and all(
        each is not None and each.sharing in SHARED and each.gpu == own.gpu for each in others
    )
