"""Instances for requests, by variant; the wait for one, and those that requests have lost.

    two instances within `MEMORY_S` ended with equal bodies of one API key --> refused until that time is over

A body that is answered meanwhile is forgotten: it was not at fault.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import TypeVar

from blake3 import blake3
from cachetools import TTLCache

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.errors import model_not_found
from triptych_gateway.routing.pairs import instances_of
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import STAGE_ROLES, TOWER_ROLES, Router
from triptych_gateway.routing.scheduling.candidates import ServingStage
from triptych_gateway.routing.served_models import ServedModels
from triptych_gateway.routing.variants import (
    RankedVariants,
    RouteDemand,
    Variant,
    VariantReason,
    able_to,
    rank_variants,
)
from triptych_gateway.settings import RoutingSettings

Incarnation = tuple[str, str]  # (instance, boot id)
MAX_LOSSES = 2  # the first one, and where the request is sent again
Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True)
class Instances:
    """Shared by all requests: the registry's view, the router, and bounds.

    A model that was served before comes back within `instance_grace_s`: its instances restart, or Redis lost
    its data and they register again.
    """

    view: RegistryView
    router: Router
    settings: RoutingSettings
    models: ServedModels = field(default_factory=ServedModels)

    async def wait_model(self, model: str) -> None:
        """Wait until `model` is served.

        Raises:
            RequestError: it is not, and does not come back in time; the same below.
        """
        await self.wait_chosen(model, lambda: model in self.view.models or None)

    def only_model(self, may_use: Callable[[str], bool]) -> str:
        """Return the model for a request that names none: the only one that its caller may use, no adapter.

        Raises:
            RequestError: 400, there are several; 503, there is none.
        """
        models = [each for each in self.view.default_models if self.models.may_use(each, may_use)]
        if len(models) > 1:
            raise RequestError(400, "missing_field", "model is missing: several are served", "model")
        if not models:
            raise self.unknown_model("")
        return models[0]

    def placeholder_tokens_of(self, name: str) -> frozenset[str]:
        """Return the placeholder tokens of the model `name`, as instances announce them. Thread-safe."""
        return self.view.placeholder_tokens_of(self.models.resolve(name))

    def encodes_sounds(self, model: str) -> bool:
        """Return whether an instance that serves `model` takes raw audio."""
        records = self.view.serving_of(model)
        return any(r.role in TOWER_ROLES and r.item_limits.get(Modality.AUDIO, 0) for r in records)

    async def check_demand(self, model: str, demand: RouteDemand) -> None:
        """Check that what `demand` names exists. A new instance may not be in the view yet.

        Raises:
            RequestError: 400, it names a missing version or instance.
        """
        if self._fault_of(model, demand) is None:
            return
        await self.view.try_refresh()
        if (fault := self._fault_of(model, demand)) is not None:
            raise fault

    def _fault_of(self, model: str, demand: RouteDemand) -> RequestError | None:
        version = demand.version
        if version is None and not demand.hosts:
            return None
        shares = self.models.shares_of(model, self.view.parent_of(model)) or {}
        known = {variant.version for variant in self.view.variants_of(model)} | shares.keys()
        if version is not None and version not in known:
            message = f"no instance serves version {version!r} of this model"
            return RequestError(400, "unknown_version", message, None)
        if demand.hosts and not self._variants_of(model, demand):
            message = "the headers name no instance that serves this model"
            return RequestError(400, "unknown_instance", message, None)
        return None

    def find_variants(
        self, model: str, demand: RouteDemand, *, has_media: bool, is_whole_only: bool = False
    ) -> RankedVariants:
        """Return the variants that a request may go to now, the best first; none without an instance."""
        variants, version = self._variants_of(model, demand), demand.version
        shares = None if version is not None else self.models.shares_of(model, self.view.parent_of(model))
        if version is not None:
            variants = tuple(each for each in variants if each.version == version)
        if shares is not None:
            variants = tuple(each for each in variants if shares.get(each.version or ""))
        able = able_to(variants, has_media=has_media, is_whole_only=is_whole_only)
        if len(able) > 1:
            ranked = rank_variants(able, shares, demand.find_session())
        else:
            ranked = RankedVariants(able, VariantReason.ONLY_ONE)
        return ranked if version is None else RankedVariants(ranked.variants, VariantReason.HEADER)

    def names_of(self, model: str, variant: Variant, demand: RouteDemand) -> Set[str] | None:
        """Return the instances of `variant`, of all stages, that a request may go to now; None: all."""
        variants = self._variants_of(model, demand)
        own = next((each for each in variants if each.key == variant.key), None)
        if own is None:
            return frozenset()
        return None if len(variants) == 1 and not demand.hosts else own.instances

    def _variants_of(self, model: str, demand: RouteDemand) -> tuple[Variant, ...]:
        """Return the variants of instances that `demand` names, and of pairs with their other halves."""
        if not demand.hosts:
            return self.view.variants_of(model)
        named = [
            each
            for stage in ServingStage
            for each in self.view.serving_of(model, stage)
            if demand.allows(each, stage)
        ]
        return self.view.variants_among(instances_of(named, model))

    async def wait_chosen(self, model: str, choose: Callable[[], Chosen | None]) -> Chosen:
        """Return what `choose` finds, once it finds something; raises as `wait_model` does."""
        if (chosen := choose()) is not None:
            return chosen
        try:
            async with asyncio.timeout(self.settings.instance_grace_s):
                while (chosen := choose()) is None:
                    if model not in self.view.models_seen:
                        raise self.unknown_model(model)
                    await self.view.wait_for_refresh()
        except TimeoutError as error:
            raise self.unknown_model(model) from error
        return chosen

    def unknown_model(self, model: str) -> RequestError:
        """Return the error for a model that is not served: 404; 503 if it was before, or no model is."""
        if self.view.models and model not in self.view.models_seen:
            return model_not_found(model)
        return RequestError(503, "no_instance", "no instance that serves this model is available", "model")


@dataclass(slots=True)
class InstanceLosses:
    """Instances that ended, or seemed to, with one request. All choices for the request share it.

    The request may be at fault. It is sent again once, and only where another instance would still serve its
    model if that one ended as well (`resend_to_last_instance`: also where none would).
    """

    lives: dict[Incarnation, ServingStage] = field(default_factory=dict)

    def add(self, record: InstanceRecord) -> None:
        self.lives[incarnation_of(record)] = stage_of(record)

    @property
    def are_too_many(self) -> bool:
        """True if the request may not be sent again."""
        return len(self.lives) >= MAX_LOSSES

    def error(self) -> RequestError:
        """Return the caller's error, which is no 503: the same request again may end the next instance."""
        message = (
            f"an instance broke off while it had this request (instances in all: {len(self.lives)}). The "
            "request may be the cause: it is not sent to another"
        )
        return RequestError(502, "instance_lost", message)


def incarnation_of(record: InstanceRecord) -> Incarnation:
    return record.instance, record.boot_id


def stage_of(record: InstanceRecord) -> ServingStage:
    return next(stage for stage, roles in STAGE_ROLES.items() if record.role in roles)


MEMORY_S = 300.0
MAX_REQUESTS = 1024
MAX_HASHED_BYTES = 4 << 20  # of a body, beside its length


class LostRequests:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lives: TTLCache[bytes, frozenset[Incarnation]] = TTLCache(MAX_REQUESTS, MEMORY_S, clock)

    def __len__(self) -> int:
        """Return the number of remembered requests; at 0 callers spare themselves the parts of a request."""
        return len(self._lives)

    def check(self, *parts: bytes) -> None:
        """Refuse a request with which as many instances have ended as one request may end.

        Args:
            parts: what makes a request the same: its key, its path and its body, in this order; media in the
                body are named.

        Raises:
            RequestError: 502.
        """
        if lives := self._lives.get(_digest(*parts)):
            losses = InstanceLosses(dict.fromkeys(lives, ServingStage.WHOLE))
            if losses.are_too_many:
                raise losses.error()

    def add(self, lives: Iterable[Incarnation], *parts: bytes) -> None:
        digest = _digest(*parts)
        self._lives[digest] = self._lives.get(digest, frozenset()) | frozenset(lives)

    def discard(self, *parts: bytes) -> None:
        self._lives.pop(_digest(*parts), None)


def _digest(*parts: bytes) -> bytes:
    *names, body = parts
    hasher = blake3(b"\0".join(names) + b"\0%d\0" % len(body))
    return hasher.update(memoryview(body)[:MAX_HASHED_BYTES]).digest()
