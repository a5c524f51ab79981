"""What this gateway knows of the other instances: read from the registry again and again, kept in between.

Heartbeats are keys with a time to live, so there is nothing to wait on but time. While Redis is away
the last view stays in use: text requests need no Redis.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from triptych_common.coordination import Registry
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_common.telemetry.logs import get_logger
from triptych_gateway.routing.item_limits import common_limits
from triptych_gateway.routing.router import (
    ENCODING_ROLES,
    SERVING_ROLES,
    TOWER_ROLES,
    can_serve,
    unloaded_adapters,
)
from triptych_gateway.routing.variants import Variant, variants_of

log = get_logger(__name__)

_STALE_INTERVALS = 6


@dataclass(frozen=True, slots=True)
class _Facts:
    """What follows from the records alone: found once for each read, not for each request."""

    records: tuple[InstanceRecord, ...]
    serving: list[InstanceRecord]
    encoding: list[InstanceRecord]
    models: list[str]  # with LoRA adapters
    base_models: list[str]  # without
    parents: dict[str, str]  # the model that an adapter belongs to, by the adapter's name
    encoder_namespaces: frozenset[str]
    serving_of: dict[str, tuple[InstanceRecord, ...]] = field(
        default_factory=dict
    )  # by model, once asked for
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)  # likewise
    item_limits: dict[str, Mapping[Modality, int]] = field(default_factory=dict)  # by namespace, likewise
    placeholder_tokens: dict[str, frozenset[str]] = field(default_factory=dict)  # by model, likewise

    @classmethod
    def of(cls, records: tuple[InstanceRecord, ...]) -> "_Facts":
        serving = [r for r in records if r.role in SERVING_ROLES and not r.draining]
        encoding = [r for r in records if r.role in ENCODING_ROLES and not r.draining]
        base_models = {r.model for r in serving if r.model is not None}
        parents = {name: r.model for r in serving for name in r.adapters if r.model is not None}
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
    """The records as last read, and a wake-up for requests that wait for an instance to register."""

    def __init__(self, registry: Registry, interval_s: float) -> None:
        self._registry = registry
        self.interval_s = interval_s
        self._changed = asyncio.Condition()
        self._seen_at = float("-inf")  # monotonic seconds of the last read that succeeded
        self.records: tuple[InstanceRecord, ...] = ()
        self._known = _Facts.of(self.records)
        self.models_seen: set[str] = set()  # served before, and may come back
        self._base_models_seen: set[str] = set()

    @property
    def is_fresh(self) -> bool:
        """The last read succeeded, not long ago."""
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
        """What a request that names no model may mean: models that are served or were before, no adapters."""
        return self._facts().base_models or sorted(self._base_models_seen)

    def parent_of(self, model: str) -> str | None:
        """The model that `model` is a LoRA adapter of; None: it is a model itself, or not served."""
        return self._facts().parents.get(model)

    def serving_of(self, model: str) -> tuple[InstanceRecord, ...]:
        """The instances that answer requests for `model`."""
        facts = self._facts()
        if model not in facts.models:  # callers name what they like: nothing is kept for it
            return ()
        if model not in facts.serving_of:
            facts.serving_of[model] = tuple(r for r in facts.serving if can_serve(r, model))
        return facts.serving_of[model]

    def placeholder_tokens_of(self, model: str) -> frozenset[str]:
        """Those that the model's instances announce. Also called in other threads."""
        facts = self._facts()
        if model not in facts.models:
            return frozenset()
        if model not in facts.placeholder_tokens:
            tokens = (record.placeholder_tokens for record in facts.serving if can_serve(record, model))
            facts.placeholder_tokens[model] = frozenset().union(*tokens)
        return facts.placeholder_tokens[model]

    def variants_of(self, model: str) -> tuple[Variant, ...]:
        """Of the instances that answer requests for `model`; one, unless its version is being changed."""
        facts = self._facts()
        if model not in facts.models:
            return ()
        if model not in facts.variants:
            serving = self.serving_of(model)
            towers = {r.namespace_digest for r in serving if r.role in TOWER_ROLES and r.namespace_digest}
            facts.variants[model] = variants_of(serving, facts.encoder_namespaces, towers)
        return facts.variants[model]

    def _facts(self) -> _Facts:
        if self._known.records is not self.records:
            self._known = _Facts.of(self.records)
        return self._known

    async def refresh(self) -> None:
        try:
            async with asyncio.timeout(max(self.interval_s * _STALE_INTERVALS, 1.0)):
                records = tuple(await self._registry.list_instances())
        except (BusUnavailableError, TimeoutError) as error:
            log.warning("registry not reachable", error=repr(error))
            return
        self._seen_at = time.monotonic()
        async with self._changed:
            self.models_seen -= unloaded_adapters(self.records, records)
            self.records = records
            self.models_seen.update(self.models)
            self._base_models_seen.update(self._facts().base_models)
            self._changed.notify_all()

    async def wait_for_refresh(self) -> None:
        """Return after the next read that succeeds. Bound it."""
        async with self._changed:
            await self._changed.wait()

    @property
    def namespaces(self) -> frozenset[str]:
        """Of all instances that are registered."""
        return frozenset(r.namespace_digest for r in self._facts().records if r.namespace_digest)

    def has_encoder(self, namespace_digest: str) -> bool:
        """An encoder of this namespace is registered."""
        return namespace_digest in self._facts().encoder_namespaces

    def item_limits(self, namespace_digest: str) -> Mapping[Modality, int]:
        """Items of a request that the namespace's encoders take; empty: none is registered, or says."""
        facts = self._facts()
        if namespace_digest not in facts.item_limits:
            own = [record for record in facts.encoding if record.namespace_digest == namespace_digest]
            facts.item_limits[namespace_digest] = common_limits(own)
        return facts.item_limits[namespace_digest]

    async def wait_for_encoder(self, namespace_digest: str) -> None:
        """Return once an encoder of this namespace is registered. Bound it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.has_encoder(namespace_digest))
