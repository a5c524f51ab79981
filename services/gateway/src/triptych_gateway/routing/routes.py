"""Route of one request: one instance or a pair, and another route after a failure.

both kinds are there      where the load is least; a pair's is that of its busier half
one kind is there         that one
a decode instance has the prompt's beginning, items included       that one alone
what is asked for cannot be divided                                one instance alone
"""

import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.endpoints.endpoint import ServedBy
from triptych_gateway.errors import unavailable
from triptych_gateway.routing.instances import (
    Incarnation,
    InstanceLosses,
    Instances,
    incarnation_of,
    stage_of,
)
from triptych_gateway.routing.pairs import fits
from triptych_gateway.routing.router import STAGE_ROLES, TOWER_ROLES
from triptych_gateway.routing.scheduling.candidates import RoutingRequest, ServingStage
from triptych_gateway.routing.variants import ANYWHERE, RouteDemand, Variant, VariantReason

WHOLE, PREFILL, DECODE = ServingStage.WHOLE, ServingStage.PREFILL, ServingStage.DECODE
Load = tuple[bool, int]  # (all of them could not be reached a moment ago, fewest requests in flight)


class RouteMode(StrEnum):
    WHOLE = "whole"  # one instance does all of it
    STAGED = "staged"  # one prefills, another takes its KV cache and decodes
    DECODE = "decode"  # an instance that decodes, alone: it has the KV cache of the prompt, or computes it


class RouteReason(StrEnum):
    NO_PAIR = "no_pair"  # no pair of instances that prefill and decode can take it, or one has failed to
    NO_WHOLE = "no_whole"  # no instance that does all of it can
    LEAST_LOAD = "least_load"
    PREFIX_HELD = "prefix_held"  # an instance that decodes has answered the conversation so far
    NOT_DIVIDED = "not_divided"  # it asks for what cannot be divided
    NO_TOKENS = "no_tokens"  # the endpoint computes none
    STORED_RESPONSE = "stored_response"  # it goes on from a response that one instance has
    ENCODES = "encodes"  # the instance is to encode the request's media itself


@dataclass(frozen=True, slots=True)
class Route:
    """Route that is chosen before anything is sent."""

    first: InstanceRecord  # gets the request first
    mode: RouteMode
    reason: RouteReason
    decode: InstanceRecord | None = None  # takes the KV cache then; None: `first` answers

    @property
    def answering(self) -> InstanceRecord:
        """Instance whose answer the caller gets."""
        return self.first if self.decode is None else self.decode


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    model: str
    namespace_digest: str | None = None  # None: text only, any namespace
    served_by: ServedBy = ServedBy.STAGES
    undivided_field: str | None = None  # field that prevents disaggregation, if any
    has_media: bool = False
    needs_tower: bool = False  # only instances that can encode the request's media themselves
    takes: Set[Modality] = frozenset()  # only instances that take raw items of these modalities

    @property
    def is_whole_only(self) -> bool:
        """True if only an instance that does all of the request can serve it."""
        return self.served_by is ServedBy.WHOLE or (self.served_by is ServedBy.ALONE and self.has_media)


@dataclass(slots=True)
class RouteChoice:
    """Choice of routes for one request, over its failures.

    All instances of a route are of one variant of the model. The number of attempts is bounded; a variant
    that has had none gets one.

    Before it gives up it waits for the registry to be read once more: a new instance is not in the view yet.
    Where no instance was asked yet, and none is registered any more, Redis may have lost its data: it waits
    for them to register again.
    """

    instances: Instances
    demand: InstanceDemand
    first: InstanceRecord | None = None  # chosen before; taken unless it is leaving meanwhile
    only: InstanceRecord | None = None  # no other will do
    held_by: Incarnation | None = None  # an instance that decodes, and has answered the conversation so far
    routing: RoutingRequest | None = None  # further facts for the choice of instances
    asked: RouteDemand = ANYWHERE  # the request's own routing rules
    variant: Variant | None = None  # for which the media are named; None: text only, one after the other
    variant_reason: VariantReason | None = None  # of `variant`; of a text's, once it is chosen
    losses: InstanceLosses = field(default_factory=InstanceLosses)
    _within: Set[str] | None = None  # instances of the variant under consideration; None: all
    _tried: set[Incarnation] = field(default_factory=set)
    _doubtful: set[Incarnation] = field(default_factory=set)  # halves of pairs whose handover has failed
    _failed: set[str] = field(default_factory=set)  # instances that have failed at it, and halves of pairs
    _num_failed: int = 0
    _error: RequestError | None = None  # of the last instance that failed at the request
    _num_handovers_failed: int = 0
    _may_refresh: bool = True

    async def next_route(self) -> Route:
        """Return the route of the next attempt.

        Raises:
            RequestError: no instance is left, or none that serves the request.
        """
        if self.losses.are_too_many:
            raise self.losses.error()
        route = self.pick()
        if route is None and self._may_refresh and self.only is None:
            self._may_refresh = False
            await self.instances.view.try_refresh()
            route = self.pick()
        if route is not None:
            return route
        if self.losses.lives:
            raise self.losses.error()
        if self._num_handovers_failed > self._num_failed:
            raise unavailable("handover_failed", "no decode instance took over the KV cache of the prefill")
        if self._error is not None:
            raise self._error
        if self._tried:
            raise unavailable("instance_unreachable", "the serving instance cannot be reached")
        if self.demand.model in self.instances.view.models:
            raise self.instances.unknown_model(self.demand.model)
        return await self.instances.wait_chosen(self.demand.model, self.pick)

    def on_unreachable(self, record: InstanceRecord) -> None:
        """Record an instance that could not be reached or went away, a bounded number of times."""
        self._tried.add(incarnation_of(record))
        self._failed.add(record.instance)
        self._num_failed += 1
        self.instances.router.avoid_instance(record.instance, time.monotonic())

    def on_broke_off(self, record: InstanceRecord) -> None:
        """Record an instance that ended, or seemed to, with the request (`InstanceLosses`)."""
        self.losses.add(record)
        self.on_unreachable(record)

    def on_failed(self, record: InstanceRecord, error: RequestError) -> None:
        """Record a failure at this request. Other requests do not avoid the instance."""
        self._tried.add(incarnation_of(record))
        self._failed.add(record.instance)
        self._num_failed += 1
        self._error = error

    def on_draining(self, record: InstanceRecord) -> None:
        """Record an instance that did nothing with the request: this costs no attempt."""
        self._tried.add(incarnation_of(record))
        self._may_refresh = True

    def on_handover_failed(self, route: Route) -> None:
        """Record that the decode instance did not take the KV cache; the request starts again, bounded."""
        self._num_handovers_failed += 1
        self._doubtful |= {incarnation_of(route.first), incarnation_of(route.answering)}
        self._failed |= {route.first.instance, route.answering.instance}

    def pick_decode(self, route: Route) -> Route | None:
        """Return another decode instance for the KV cache of `route.first`, which none has taken."""
        decode = self._pick_of([each for each in self._able(DECODE) if fits(route.first, each)], DECODE)
        picked = None if decode is None else replace(route, decode=decode)
        return picked if picked is not None and self._may_lose(picked) else None

    def pick(self) -> Route | None:
        """Return the next route by what is known now.

        Raises:
            RequestError: the registered instances do not serve the request.
        """
        if self.only is not None:
            if self._tried or self._num_handovers_failed or self.losses.lives:
                return None
            return Route(self.only, _mode_alone(self.only), RouteReason.STORED_RESPONSE)
        first, self.first = self.first, None
        held_by, self.held_by = self.held_by, None
        for within in self._allowed():
            self._within = within
            route = self._pick_within(first, held_by)
            if route is not None and self._may_lose(route):
                return route
        return None

    def pick_first(self) -> InstanceRecord | None:
        """Return the instance that would get the request first; of a pair, the one that prefills.

        Raises:
            RequestError: as `pick`.
        """
        for within in self._allowed():
            self._within = within
            found = self._pick_first()
            if found is not None:
                return found[0]
        return None

    def _allowed(self) -> Iterable[Set[str] | None]:
        """Yield instances by variant, the request's own first; None for all.

        Variants that could not be reached a moment ago come last.
        """
        demand, instances = self.demand, self.instances
        if self.variant is not None:
            return (instances.names_of(demand.model, self.variant, self.asked),)
        ranked = instances.find_variants(
            demand.model, self.asked, has_media=False, is_whole_only=demand.is_whole_only
        )
        self.variant_reason = ranked.reason
        allowed = [each.instances for each in ranked.variants]
        if len(allowed) > 1:
            allowed.sort(key=self._is_suspect)
        return allowed

    def _is_suspect(self, within: Set[str]) -> bool:
        """Return whether none of these instances that the request needs could be reached a moment ago."""
        self._within, served_by, now = within, self.demand.served_by, time.monotonic()
        clear = {
            stage
            for stage in ServingStage
            if any(not self.instances.router.is_suspect(each.instance, now) for each in self._able(stage))
        }
        if WHOLE in clear or self.demand.is_whole_only:
            return WHOLE not in clear
        return not clear if served_by is not ServedBy.STAGES else not clear >= {PREFILL, DECODE}

    def _pick_within(self, first: InstanceRecord | None, held_by: Incarnation | None) -> Route | None:
        for record in self._able(DECODE) if held_by is not None else ():
            if incarnation_of(record) == held_by:
                return Route(record, RouteMode.DECODE, RouteReason.PREFIX_HELD)
        if first is not None and self._stays(first):
            route = self._route_from(first, self._reason_of_first())
            if route is not None:
                return route
        has_failed = self._within is None or not self._within.isdisjoint(self._failed)
        if (
            has_failed
            and max(self._num_failed, self._num_handovers_failed)
            >= self.instances.settings.max_dispatch_attempts
        ):
            self._may_refresh = False
            return None
        found = self._pick_first()
        return None if found is None else self._route_from(*found)

    def _stays(self, record: InstanceRecord) -> bool:
        """Return whether the instance remains: not ended with the request, not leaving, name not taken.

        The registry may have lost it.
        """
        if incarnation_of(record) in self.losses.lives:
            return False
        named = (each for each in self.instances.view.records if each.instance == record.instance)
        return all(incarnation_of(each) == incarnation_of(record) and not each.draining for each in named)

    def _pick_first(self) -> tuple[InstanceRecord, RouteReason] | None:
        whole, served_by = self._able(WHOLE), self.demand.served_by
        if served_by is ServedBy.ANY:
            by_stage = {stage: self._able(stage) for stage in ServingStage}
            loads = {
                stage: load for stage, each in by_stage.items() if (load := self._load(each)) is not None
            }
            stage = min(loads, key=lambda each: loads[each], default=WHOLE)
            return self._first_of(by_stage[stage], stage, RouteReason.NO_TOKENS)
        if served_by is not ServedBy.STAGES:
            found = self._first_of(whole, WHOLE, RouteReason.NOT_DIVIDED)
            if found is None and served_by is ServedBy.ALONE and not self.demand.has_media:
                found = self._first_of(self._able(DECODE), DECODE, RouteReason.NOT_DIVIDED)
            if found is None and not self._tried and self._able(PREFILL):
                raise self._not_served()
            return found
        prefills = self._able(PREFILL)
        whole_load = self._load(whole)
        pair_load = self._pair_load(prefills, self._able(DECODE)) if prefills else None
        if self._num_handovers_failed and whole_load is not None and not whole_load[0]:
            pair_load = None  # another handover may fail as the first one did
        decided = decide(whole_load, pair_load)
        if decided is None:
            return None
        mode, reason = decided
        return self._first_of(*((whole, WHOLE) if mode is RouteMode.WHOLE else (prefills, PREFILL)), reason)

    def _route_from(self, first: InstanceRecord, reason: RouteReason) -> Route | None:
        """Return the route from `first`; None if it prefills and no instance fits it."""
        if first.role not in STAGE_ROLES[PREFILL] or self.demand.served_by is ServedBy.ANY:
            return Route(first, _mode_alone(first), reason)
        decode = self._pick_of([each for each in self._able(DECODE) if fits(first, each)], DECODE)
        return None if decode is None else Route(first, RouteMode.STAGED, reason, decode)

    def _reason_of_first(self) -> RouteReason:
        if self.demand.needs_tower:
            return RouteReason.ENCODES
        if self.demand.served_by is not ServedBy.STAGES:
            return RouteReason.NO_TOKENS if self.demand.served_by is ServedBy.ANY else RouteReason.NOT_DIVIDED
        if not self._able(PREFILL):
            return RouteReason.NO_PAIR
        return RouteReason.LEAST_LOAD if self._able(WHOLE) else RouteReason.NO_WHOLE

    def _first_of(
        self, records: Sequence[InstanceRecord], stage: ServingStage, reason: RouteReason
    ) -> tuple[InstanceRecord, RouteReason] | None:
        record = self._pick_of(records, stage)
        return None if record is None else (record, reason)

    def _able(self, stage: ServingStage) -> list[InstanceRecord]:
        """Return instances of `stage` that may get the request now; prefill ones have a fitting decode."""
        demand, view = self.demand, self.instances.view
        is_decode = stage is DECODE
        able = [
            each
            for each in view.serving_of(demand.model, stage)
            if (self._within is None or each.instance in self._within)
            and incarnation_of(each) not in self._tried
            and incarnation_of(each) not in self.losses.lives
            and demand.namespace_digest in (None, each.namespace_digest)
            and (is_decode or not demand.needs_tower or each.role in TOWER_ROLES)
            and (is_decode or demand.takes <= each.item_limits.keys())
        ]
        if stage is PREFILL and able:
            decodes = self._able(DECODE)
            able = [each for each in able if any(fits(each, decode) for decode in decodes)]
        return [each for each in able if incarnation_of(each) not in self._doubtful] or able

    def _may_lose(self, route: Route) -> bool:
        """Return whether the request may go there although an instance has ended with it.

        Where that was half of a pair, the other half may be the only one of its stage.
        """
        lost = set(self.losses.lives.values())
        if not lost or self.instances.settings.resend_to_last_instance:
            return True
        asked = [each for each in (route.first, route.answering) if WHOLE in lost or stage_of(each) in lost]
        return all(map(self._is_served_without, asked))

    def _is_served_without(self, record: InstanceRecord) -> bool:
        """Return whether the model is served without `record` and those that have ended with the request."""
        gone, now = {*self.losses.lives, incarnation_of(record)}, time.monotonic()
        left = {
            stage
            for stage in ServingStage
            for each in self.instances.view.serving_of(self.demand.model, stage)
            if incarnation_of(each) not in gone and not self.instances.router.is_suspect(each.instance, now)
        }
        return WHOLE in left or left >= {PREFILL, DECODE}

    def _pick_of(self, records: Sequence[InstanceRecord], stage: ServingStage) -> InstanceRecord | None:
        demand, is_decode = self.demand, stage is DECODE
        return self.instances.router.pick_instance(
            records,
            model=demand.model,
            namespace_digest=demand.namespace_digest,
            exclude=frozenset(),
            now=time.monotonic(),
            needs_tower=demand.needs_tower and not is_decode,
            takes=frozenset() if is_decode else demand.takes,
            stage=stage,
            routing=self.routing,
        )

    def _load(self, records: Iterable[InstanceRecord]) -> Load | None:
        router, now = self.instances.router, time.monotonic()
        loads = [(router.is_suspect(each.instance, now), router.num_requests(each, now)) for each in records]
        return min(loads, default=None)

    def _pair_load(
        self, prefills: Sequence[InstanceRecord], decodes: Sequence[InstanceRecord]
    ) -> Load | None:
        prefill, decode = self._load(prefills), self._load(decodes)
        return None if prefill is None or decode is None else max(prefill, decode)

    def _not_served(self) -> RequestError:
        """Return the error for a request that pairs, the only instances, do not serve."""
        name = self.demand.undivided_field
        if name is None:
            return RequestError(
                404, "endpoint_not_served", "this model does not serve this endpoint", "model"
            )
        message = f"{name} is not served here: no instance of this model prefills and decodes"
        return RequestError(400, "unsupported", message, name)


def _mode_alone(record: InstanceRecord) -> RouteMode:
    return RouteMode.DECODE if record.role in STAGE_ROLES[DECODE] else RouteMode.WHOLE


def decide(whole: Load | None, pair: Load | None) -> tuple[RouteMode, RouteReason] | None:
    """Return the mode of a request that may be divided; None without an instance of either kind.

    Equal loads go whole, which costs no transfer; `pair` is the load of its busier half.
    """
    if whole is None or pair is None:
        if whole is not None:
            return RouteMode.WHOLE, RouteReason.NO_PAIR
        return None if pair is None else (RouteMode.STAGED, RouteReason.NO_WHOLE)
    return RouteMode.STAGED if pair < whole else RouteMode.WHOLE, RouteReason.LEAST_LOAD
