"""Instances that serve a model: those that do all of a request, and pairs that share one. Pure.

A pair is an instance that prefills and one that decodes, of one model, one version and one namespace,
whose KV connectors fit. An instance of either kind without the other serves nothing.
"""

from collections.abc import Iterable, Mapping, Sequence, Set

from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.routing.router import STAGE_ROLES, TOWER_ROLES, can_serve
from triptych_gateway.routing.scheduling.candidates import ServingStage


def fits(prefill: InstanceRecord, decode: InstanceRecord) -> bool:
    """Return whether `decode` can take a KV cache that `prefill` has made."""
    one, other = prefill.kv_transfer, decode.kv_transfer
    return (
        one is not None
        and other is not None
        and (one.connector, one.compatibility) == (other.connector, other.compatibility)
        and prefill.model == decode.model
        and prefill.model_version == decode.model_version
        and prefill.namespace_digest == decode.namespace_digest
    )


def pairs_of(records: Iterable[InstanceRecord]) -> list[tuple[InstanceRecord, InstanceRecord]]:
    """Return every (prefill, decode) pair that can share a request."""
    living = [each for each in records if each.url is not None and not each.draining]
    prefills = [each for each in living if each.role in STAGE_ROLES[ServingStage.PREFILL]]
    decodes = [each for each in living if each.role in STAGE_ROLES[ServingStage.DECODE]]
    return [(prefill, decode) for prefill in prefills for decode in decodes if fits(prefill, decode)]


def serving_of(
    records: Iterable[InstanceRecord], model: str, stage: ServingStage
) -> tuple[InstanceRecord, ...]:
    """Return the instances for this stage of requests for `model`; halves of pairs need the other half."""
    if stage is ServingStage.WHOLE:
        return tuple(each for each in records if can_serve(each, model, stage))
    records = tuple(records)
    prefills = [each for each in records if can_serve(each, model, ServingStage.PREFILL)]
    decodes = [each for each in records if can_serve(each, model, ServingStage.DECODE)]
    if stage is ServingStage.PREFILL:
        return tuple(each for each in prefills if any(fits(each, decode) for decode in decodes))
    return tuple(each for each in decodes if any(fits(prefill, each) for prefill in prefills))


def instances_of(records: Sequence[InstanceRecord], model: str) -> tuple[InstanceRecord, ...]:
    """Return all instances that serve `model`, whatever their stage."""
    return tuple(each for stage in ServingStage for each in serving_of(records, model, stage))


def announced(modalities: Set[Modality]) -> Set[Modality]:
    """Return the modalities that an instance with a tower must announce: every one takes images."""
    return modalities - {Modality.IMAGE}


def towers_of(
    records: Sequence[InstanceRecord], model: str, namespace_digest: str, modalities: Set[Modality]
) -> tuple[InstanceRecord, ...]:
    """Return the instances that could encode a request for `model` from its raw media."""
    takes = announced(modalities)
    return tuple(
        each
        for stage in (ServingStage.WHOLE, ServingStage.PREFILL)
        for each in serving_of(records, model, stage)
        if each.role in TOWER_ROLES
        and each.namespace_digest == namespace_digest
        and takes <= each.item_limits.keys()
    )


def has_tower(
    records: Iterable[InstanceRecord], model: str, namespace_digest: str, modalities: Set[Modality]
) -> bool:
    """Return whether some instance could serve a request for `model` with its raw media."""
    return bool(towers_of(tuple(records), model, namespace_digest, modalities))


def common_limits(records: Iterable[InstanceRecord]) -> Mapping[Modality, int]:
    """Return what all of `records` take; empty if none of them announces limits."""
    limits = [record.item_limits for record in records if record.item_limits]
    shared = set(Modality).intersection(*limits) if limits else set()
    return {modality: min(each[modality] for each in limits) for modality in shared}


def widest_limits(records: Iterable[InstanceRecord]) -> Mapping[Modality, int]:
    """Return what some of `records` take; empty if not all announce limits, or there are none."""
    limits = [record.item_limits for record in records]
    if not all(limits):
        return {}
    return {
        modality: max(each.get(modality, 0) for each in limits) for modality in set[Modality]().union(*limits)
    }
