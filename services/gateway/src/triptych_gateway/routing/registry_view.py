"""View of the registry: the other instances, read at intervals and kept in between.

Heartbeats are keys with a time to live, so a change can only be polled. While Redis is away the last view
stays in use: text requests need no Redis.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.routing.pairs import common_limits, instances_of, pairs_of, serving_of
from triptych_gateway.routing.router import (
    ENCODING_ROLES,
    SERVING_ROLES,
    TOWER_ROLES,
    unloaded_adapters,
)
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.variants import Variant, variants_of

log = get_logger(__name__)

_STALE_INTERVALS = 6
REFRESH_LIMIT_S = 2.0  # of a wait for another read, beyond the interval
FORGET_S = 60.0
"""Seconds for which facts about an instance outlive its record: Redis may have lost it. A restarted instance
announces another `boot_id`."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that follow from the records alone, computed once for each read."""

    records: tuple[InstanceRecord, ...]
    serving: list[InstanceRecord]
    encoding: list[InstanceRecord]
    models: list[str]  # with LoRA adapters
    base_models: list[str]  # without
    parents: dict[str, str]  # the model that an adapter belongs to, by the adapter's name
    encoder_namespaces: frozenset[str]
    serving_of: dict[tuple[str, ServingStage], tuple[InstanceRecord, ...]] = field(
        default_factory=dict
    )  # by model and stage, once asked for
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)  # by model, likewise
    item_limits: dict[str, Mapping[Modality, int]] = field(default_factory=dict)  # by namespace, likewise
    placeholder_tokens: dict[str, frozenset[str]] = field(default_factory=dict)  # by model, likewise

    @classmethod
    def of(cls, records: tuple[InstanceRecord, ...]) -> "_Facts":
        whole = [r for r in records if r.role in SERVING_ROLES and not r.draining]
        pairs = pairs_of(records)
        members = {r.instance for pair in pairs for r in pair}
        serving = whole + [r for r in records if r.instance in members]
        encoding = [r for r in records if r.role in ENCODING_ROLES and not r.draining]
        base_models = {r.model for r in serving if r.model is not None}
        loaded = [(r.adapters, r.model) for r in whole]
        loaded += [(tuple(set(p.adapters) & set(d.adapters)), p.model) for p, d in pairs]
        parents = {name: model for names, model in loaded for name in names if model is not None}
        for model in base_models:
            parents.pop(model, None)
        return cls(
            records=records,
            serving=serving,
            encoding=encoding,
            models=sorted(base_models | parents.keys()),
            base_models=sorted(base_models),
            parents=parents,
            encoder_namespaces=frozenset(r.namespace_digest for r in encoding if r.namespace_digest),
        )


class RegistryView:
    """Records as last read, and a wake-up for requests that wait for an instance to register."""

    def __init__(self, registry: Registry, interval_s: float) -> None:
        self._registry = registry
        self.interval_s = interval_s
        self._changed = asyncio.Condition()
        self._seen_at = float("-inf")  # monotonic seconds of the last read that succeeded
        self._last_seen: dict[str, float] = {}  # monotonic seconds, by instance
        self.records: tuple[InstanceRecord, ...] = ()
        self._known = _Facts.of(self.records)
        self.models_seen: set[str] = set()  # served before, and may come back
        self._base_models_seen: set[str] = set()

    @property
    def is_fresh(self) -> bool:
        """True if the last read succeeded not long ago."""
        return time.monotonic() - self._seen_at < self.interval_s * _STALE_INTERVALS + 1.0

    @property
    def serving(self) -> list[InstanceRecord]:
        return self._facts().serving

    @property
    def encoding(self) -> list[InstanceRecord]:
        return self._facts().encoding

    @property
    def models(self) -> list[str]:
        """Names that are served now, sorted: models and LoRA adapters."""
        return self._facts().models

    @property
    def default_models(self) -> list[str]:
        """Return models for a request that names none: served now, or before; no adapters."""
        return self._facts().base_models or sorted(self._base_models_seen)

    def parent_of(self, model: str) -> str | None:
        """Return the model of the LoRA adapter `model`; None for a model, or a name that is not served."""
        return self._facts().parents.get(model)

    def serving_of(self, model: str, stage: ServingStage = ServingStage.WHOLE) -> tuple[InstanceRecord, ...]:
        facts = self._facts()
        if model not in facts.models:  # callers may send any name: nothing is cached for it
            return ()
        if (model, stage) not in facts.serving_of:
            facts.serving_of[model, stage] = serving_of(facts.serving, model, stage)
        return facts.serving_of[model, stage]

    def instances_of(self, model: str) -> tuple[InstanceRecord, ...]:
        return tuple(each for stage in ServingStage for each in self.serving_of(model, stage))

    def placeholder_tokens_of(self, model: str) -> frozenset[str]:
        """Return the placeholder tokens that the model's instances announce. Thread-safe."""
        facts = self._facts()
        if model not in facts.models:
            return frozenset()
        if model not in facts.placeholder_tokens:
            tokens = (record.placeholder_tokens for record in instances_of(facts.serving, model))
            facts.placeholder_tokens[model] = frozenset().union(*tokens)
        return facts.placeholder_tokens[model]

    def variants_of(self, model: str) -> tuple[Variant, ...]:
        """Return the variants of the model's instances; one, unless its version is being changed."""
        facts = self._facts()
        if model not in facts.models:
            return ()
        if model not in facts.variants:
            facts.variants[model] = self.variants_among(self.instances_of(model))
        return facts.variants[model]

    def variants_among(self, serving: Sequence[InstanceRecord]) -> tuple[Variant, ...]:
        """Return the variants of these instances, which serve one model."""
        towers = {r.namespace_digest for r in serving if r.role in TOWER_ROLES and r.namespace_digest}
        return variants_of(serving, self._facts().encoder_namespaces, towers)

    def _facts(self) -> _Facts:
        if self._known.records is not self.records:
            self._known = _Facts.of(self.records)
        return self._known

    async def refresh(self) -> bool:
        """Read the registry; return False and keep the last view if it cannot be reached."""
        try:
            async with asyncio.timeout(max(self.interval_s * _STALE_INTERVALS, 1.0)):
                records = tuple(await self._registry.list_instances())
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("registry not reachable", error=repr(error))
            return False
        self._seen_at = time.monotonic()
        async with self._changed:
            self.models_seen -= unloaded_adapters(self.records, records)
            self.records = records
            self.models_seen.update(self.models)
            self._base_models_seen.update(self._facts().base_models)
            self._changed.notify_all()
        return True

    def seen_lately(self, now: float) -> set[str]:
        """Return instances registered within the last `FORGET_S`; `now` is in monotonic seconds."""
        self._last_seen.update((record.instance, now) for record in self.records)
        self._last_seen = {each: at for each, at in self._last_seen.items() if now - at < FORGET_S}
        return set(self._last_seen)

    async def try_refresh(self) -> None:
        """Wait until the registry has been read once more; while Redis is away the last view stays."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.interval_s + REFRESH_LIMIT_S):
                await self.wait_for_refresh()

    async def wait_for_refresh(self) -> None:
        """Return after the next read that succeeds. Bound it."""
        async with self._changed:
            await self._changed.wait()

    @property
    def namespaces(self) -> frozenset[str]:
        return frozenset(r.namespace_digest for r in self._facts().records if r.namespace_digest)

    def has_encoder(self, namespace_digest: str) -> bool:
        return namespace_digest in self._facts().encoder_namespaces

    def item_limits(self, namespace_digest: str) -> Mapping[Modality, int]:
        """Return the items per request that the namespace's encoders take; empty if none announces them."""
        facts = self._facts()
        if namespace_digest not in facts.item_limits:
            own = [record for record in facts.encoding if record.namespace_digest == namespace_digest]
            facts.item_limits[namespace_digest] = common_limits(own)
        return facts.item_limits[namespace_digest]
