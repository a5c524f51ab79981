"""How many items of which kind a namespace takes in a request: as its engines announce it. Pure."""

from collections.abc import Iterable, Mapping

from triptych_common.protocol.messages import InstanceRecord, Modality


def common_limits(records: Iterable[InstanceRecord]) -> Mapping[Modality, int]:
    """What all of `records` take; empty: none of them says."""
    limits = [record.item_limits for record in records if record.item_limits]
    shared = set(Modality).intersection(*limits) if limits else set()
    return {modality: min(each[modality] for each in limits) for modality in shared}


def widest_limits(records: Iterable[InstanceRecord]) -> Mapping[Modality, int]:
    """What some of `records` take; empty: not all of them say, or there are none."""
    limits = [record.item_limits for record in records]
    if not all(limits):
        return {}
    return {
        modality: max(each.get(modality, 0) for each in limits) for modality in set[Modality]().union(*limits)
    }
