"""Limits of items by modality in a request, as a namespace's engines announce them. Pure."""

from collections.abc import Iterable, Mapping

from triptych_common.protocol.messages import InstanceRecord, Modality


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
