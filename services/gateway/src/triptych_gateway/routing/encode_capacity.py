"""Capacity of a namespace's encoders, and the number of gateways that share it, from the registry."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_gateway.routing.router import ENCODING_ROLES

SPARE_PART = 4  # one of this many slots of an encoder is spare


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one namespace's encoders."""

    num_slots: int
    num_spare: int  # of them, for flows that have none
    num_gateways: int


class EncodeCapacity:
    """Capacities, computed once for each read of the registry, not for each job."""

    def __init__(self, records: Callable[[], Sequence[InstanceRecord]]) -> None:
        """Store the records' source, which returns a new object after each read of the registry."""
        self._records = records
        self._seen: Sequence[InstanceRecord] = ()
        self._known: dict[str, Capacity] = {}

    def of(self, namespace_digest: str) -> Capacity:
        records = self._records()
        if records is not self._seen:
            self._seen, self._known = records, {}
        if namespace_digest not in self._known:
            self._known[namespace_digest] = _capacity(records, namespace_digest)
        return self._known[namespace_digest]


def _capacity(records: Sequence[InstanceRecord], namespace_digest: str) -> Capacity:
    alive = [each for each in records if not each.draining]
    encoders = [r for r in alive if r.role in ENCODING_ROLES and r.namespace_digest == namespace_digest]
    return Capacity(
        num_slots=sum(each.num_slots for each in encoders),
        num_spare=sum(each.num_slots // SPARE_PART for each in encoders),
        num_gateways=sum(each.role is Role.GATEWAY for each in alive),
    )
