"""Router: which prefill_decode serves a request. Pure; `now` is an argument.

Fewest requests in flight from this gateway, then the one picked least recently. An instance that
could not be reached is avoided for a while, unless there is no other.
"""

from collections import Counter
from collections.abc import Iterable, Set
from enum import StrEnum
from itertools import count

from triptych_common.protocol.messages import InstanceRecord, Modality, Role, Sharing

SERVING_ROLES = frozenset({Role.PREFILL_DECODE, Role.ENCODE_PREFILL_DECODE})
TOWER_ROLES = frozenset({Role.ENCODE_PREFILL_DECODE})  # serve requests with raw media, too


class ServingStage(StrEnum):
    """What of a request an instance is asked for."""

    WHOLE = "whole"  # prefill and decode
    PREFILL = "prefill"  # its KV cache is kept for an instance that decodes
    DECODE = "decode"  # from a KV cache that another instance has made


STAGE_ROLES = {
    ServingStage.WHOLE: SERVING_ROLES,
    ServingStage.PREFILL: frozenset({Role.PREFILL, Role.ENCODE_PREFILL}),
    ServingStage.DECODE: frozenset({Role.DECODE}),
}
ENCODING_ROLES = frozenset({Role.ENCODE})  # take encode jobs
SHARED = frozenset({Sharing.CORES, Sharing.MPS, Sharing.TIME_SLICES})


class Router:
    """Knows the load that this gateway put on each instance."""

    def __init__(self, suspect_s: float) -> None:
        self._suspect_s = suspect_s
        self._num_in_flight: Counter[str] = Counter()
        self._picked_at: dict[str, int] = {}
        self._suspect_until: dict[str, float] = {}
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
        takes: Modality | None = None,
        only: Set[str] | None = None,
    ) -> InstanceRecord | None:
        """The instance for one request; None: none can take it.

        Args:
            namespace_digest: only instances of this namespace; None: any (text only).
            exclude: instances that were tried for this request.
            now: monotonic seconds.
            needs_tower: only instances that can encode the request's media themselves.
            takes: only instances that take raw items of this modality.
            only: no others than these; None: any.
        """
        able = [
            record
            for record in records
            if can_serve(record, model)
            and (namespace_digest is None or record.namespace_digest == namespace_digest)
            and record.instance not in exclude
            and (only is None or record.instance in only)
            and (record.role in TOWER_ROLES or not needs_tower)
            and (takes is None or record.item_limits.get(takes, 0))
        ]
        if not able:
            return None
        chosen = min(
            able,
            key=lambda record: (
                self._suspect_until.get(record.instance, 0.0) > now,
                self._num_in_flight[record.instance],
                self._picked_at.get(record.instance, 0),
            ),
        )
        self._picked_at[chosen.instance] = next(self._tick)
        return chosen

    def begin_request(self, instance: str) -> None:
        """A request goes to `instance`."""
        self._num_in_flight[instance] += 1

    def end_request(self, instance: str) -> None:
        """Its answer has ended, in whatever way."""
        self._num_in_flight[instance] -= 1
        if self._num_in_flight[instance] <= 0:
            del self._num_in_flight[instance]

    def avoid_instance(self, instance: str, now: float) -> None:
        """`instance` could not be reached."""
        self._suspect_until[instance] = now + self._suspect_s

    def num_in_flight(self, instance: str) -> int:
        return self._num_in_flight[instance]

    def forget_all_but(self, alive: Set[str]) -> None:
        """Drop what is known of instances that have left the registry."""
        for known in (self._picked_at, self._suspect_until):
            for instance in known.keys() - alive:
                del known[instance]


def can_serve(record: InstanceRecord, model: str, stage: ServingStage = ServingStage.WHOLE) -> bool:
    """Whether `record` takes this stage of requests for `model`: its model, or one of its LoRA adapters."""
    return (
        record.role in STAGE_ROLES[stage]
        and record.url is not None
        and (record.model == model or model in record.adapters)
        and not record.draining
    )


def unloaded_adapters(before: Iterable[InstanceRecord], after: Iterable[InstanceRecord]) -> set[str]:
    """Names of LoRA adapters that an instance has no more, though it lives on: nobody waits for them."""
    living = {(record.instance, record.boot_id): set(record.adapters) for record in after}
    lost: set[str] = set()
    for record in before:
        lost |= set(record.adapters) - living.get((record.instance, record.boot_id), set(record.adapters))
    return lost


def has_tower(records: Iterable[InstanceRecord], model: str, namespace_digest: str) -> bool:
    """Whether some instance could serve a request for `model` with its raw media."""
    return any(
        record.role in TOWER_ROLES
        and can_serve(record, model)
        and record.namespace_digest == namespace_digest
        for record in records
    )


def shares_compute(instance: InstanceRecord, encoders: Iterable[InstanceRecord]) -> bool:
    """Whether all of `encoders` compute on what `instance` computes on: cores of their host, or one GPU."""
    own = instance.compute
    if own is None or own.sharing not in SHARED:
        return False
    others = [record.compute for record in encoders]
    return bool(others) and all(
        each is not None and each.sharing in SHARED and each.gpu == own.gpu for each in others
    )
