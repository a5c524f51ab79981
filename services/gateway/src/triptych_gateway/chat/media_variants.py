"""Variant of its model for a request with media, and another one when that has left.

Its items are named for one namespace, so all of it goes to one variant: `Arrival.variant`.
"""

from collections.abc import Set
from dataclasses import replace

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord
from triptych_gateway.chat.dispatch import Arrival, PriorResponse
from triptych_gateway.chat.forward import demand_of
from triptych_gateway.request.chat_request import ChatRequest
from triptych_gateway.routing.instances import Instances
from triptych_gateway.routing.router import SERVING_ROLES
from triptych_gateway.routing.routes import RouteChoice
from triptych_gateway.routing.scheduling.candidates import RoutingRequest
from triptych_gateway.routing.variants import RankedVariants, Variant, VariantReason

LEFT_CODES = frozenset({"no_instance", "instance_unreachable", "no_encoder"})
"""Error codes that mean that no instance is left in the version of the request."""


async def wait_variant(instances: Instances, request: ChatRequest, arrival: Arrival) -> Arrival:
    """Return `arrival` with its variant, once there is one.

    Raises:
        RequestError: there is none, and none comes back in time.
    """
    ranked = _settled_by(arrival.prior)
    if ranked is None:
        ranked = await instances.wait_chosen(request.model, lambda: _ranked(instances, request, arrival))
    return replace(arrival, variant=ranked.variants[0], variant_reason=ranked.reason)


def another_variant(instances: Instances, request: ChatRequest, arrival: Arrival) -> Variant | None:
    """Return a variant that can still serve the request with items of its own, or None."""
    if arrival.prior is not None or arrival.variant is None:
        return None
    gone = {arrival.variant.key, *arrival.left}
    ranked = _ranked(instances, request, arrival)
    variants = () if ranked is None else ranked.variants
    return next((each for each in variants if each.encodes and each.key not in gone), None)


def moved_to(variant: Variant, arrival: Arrival) -> Arrival:
    """Return `arrival` for a new start at `variant`, without return to the one before."""
    left = arrival.left if arrival.variant is None else arrival.left | {arrival.variant.key}
    return replace(arrival, variant=variant, variant_reason=VariantReason.LEFT, left=left)


async def wait_instance(
    instances: Instances, request: ChatRequest, arrival: Arrival, routing: RoutingRequest
) -> InstanceRecord:
    """Return the instance that gets the request if encoders encode; of a pair, the one that prefills.

    Does not wait if another variant has an instance.

    Raises:
        RequestError: there is none, or none that does what the request asks for.
    """
    if arrival.prior is not None:
        if arrival.prior.record.role not in SERVING_ROLES:
            message = "media cannot follow a response of an instance that only decodes"
            raise RequestError(400, "unsupported", message, request.media[0].path)
        return arrival.prior.record
    demand = demand_of(request, request.endpoint, digest_of(arrival))
    choice = RouteChoice(instances, demand, routing=routing, asked=arrival.demand, variant=arrival.variant)

    def choose() -> InstanceRecord | None:
        record = choice.pick_first()
        if record is None and _ranked(instances, request, arrival) is not None:
            raise instances.unknown_model(request.model)
        return record

    return await instances.wait_chosen(request.model, choose)


def names_of(instances: Instances, request: ChatRequest, arrival: Arrival) -> Set[str] | None:
    """Return the names of instances that may get the request; None for all of its namespace."""
    if arrival.prior is not None or arrival.variant is None:
        return None
    return instances.names_of(request.model, arrival.variant, arrival.demand)


def digest_of(arrival: Arrival) -> str:
    """Return the digest of the request's namespace."""
    if arrival.variant is None or arrival.variant.namespace_digest is None:
        raise ValueError("media go to instances of a namespace alone")
    return arrival.variant.namespace_digest


def _ranked(instances: Instances, request: ChatRequest, arrival: Arrival) -> RankedVariants | None:
    """Return the variants that can take the request now, or None."""
    ranked = instances.find_variants(
        request.model,
        arrival.demand,
        has_media=True,
        is_whole_only=demand_of(request, request.endpoint).is_whole_only,
    )
    return ranked if ranked.variants else None


def _settled_by(prior: PriorResponse | None) -> RankedVariants | None:
    """Return the variant of the instance with the stored response; None if there is a choice."""
    if prior is None or prior.record.namespace_digest is None:
        return None
    record = prior.record
    own = Variant(record.model_version, record.namespace_digest, frozenset({record.instance}))
    return RankedVariants((own,), VariantReason.STORED_RESPONSE)
