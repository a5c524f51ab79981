"""The prefill_decodes that one request may go to: waits for one, chooses it, and the next after a failure."""

import asyncio
import time
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.errors import model_not_found, unavailable
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.route_demand import ANYWHERE, RouteDemand
from triptych_gateway.routing.router import TOWER_ROLES, Router, ServingStage
from triptych_gateway.routing.served_models import ServedModels
from triptych_gateway.routing.variants import (
    RankedVariants,
    Variant,
    VariantReason,
    able_to,
    rank_variants,
)

REFRESH_LIMIT_S = 2.0  # beyond the view's own interval
Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True)
class Instances:
    """What all requests share: the registry's view, the router, and bounds.

    A model that was served before comes back within `grace_s`: its instances restart, or Redis lost its
    data and they register again.
    """

    view: RegistryView
    router: Router
    grace_s: float
    max_attempts: int  # instances that could not be reached, for one request
    models: ServedModels = field(default_factory=ServedModels)

    async def wait_model(self, model: str) -> None:
        """Until `model` is served.

        Raises:
            RequestError: it is not, and does not come back in time. Likewise below.
        """
        await self._wait(model, lambda: model in self.view.models or None)

    def only_model(self, may_use: Callable[[str], bool]) -> str:
        """The model of a request that names none: the only one that its caller may use, and no LoRA adapter.

        Raises:
            RequestError: 400, there are several; 503, there is none.
        """
        models = [each for each in self.view.default_models if self.models.may_use(each, may_use)]
        if len(models) > 1:
            raise RequestError(400, "missing_field", "model is missing, and several are served", "model")
        if not models:
            raise self.unknown_model("")
        return models[0]

    def placeholder_tokens_of(self, name: str) -> frozenset[str]:
        """Those that instances announce of the model that is asked for as `name`. Also called in threads."""
        return self.view.placeholder_tokens_of(self.models.resolve(name))

    def encodes_sounds(self, model: str) -> bool:
        """Whether an instance that serves `model` takes raw sounds."""
        records = self.view.serving_of(model)
        return any(r.role in TOWER_ROLES and r.item_limits.get(Modality.AUDIO, 0) for r in records)

    def check_demand(self, model: str, demand: RouteDemand) -> None:
        """That `demand` is for what there is.

        Raises:
            RequestError: 400, it names a version or an instance that is not there.
        """
        shares = self.models.shares_of(model, self.view.parent_of(model)) or {}
        version = demand.version
        known = {variant.version for variant in self.view.variants_of(model)} | shares.keys()
        if version is not None and version not in known:
            message = f"no instance serves version {version!r} of this model"
            raise RequestError(400, "unknown_version", message, None)
        for stage in demand.hosts and (ServingStage.WHOLE, *demand.hosts):
            if not demand.names_of(self.view.serving_of(model), stage):
                message = "the headers name no instance that serves this model"
                raise RequestError(400, "unknown_instance", message, None)

    def find_variants(self, model: str, demand: RouteDemand, *, has_media: bool) -> RankedVariants:
        """Where a request may go now, the best first; nothing where no instance is there for it."""
        variants, version = self.view.variants_of(model), demand.version
        shares = None if version is not None else self.models.shares_of(model, self.view.parent_of(model))
        if version is not None:
            variants = tuple(each for each in variants if each.version == version)
        if shares is not None:
            variants = tuple(each for each in variants if shares.get(each.version or ""))
        if demand.hosts:
            names = demand.names_of(self.view.serving_of(model))
            variants = tuple(each.among(names) for each in variants)
        able = able_to(variants, has_media=has_media)
        if len(able) > 1:
            ranked = rank_variants(able, shares, demand.find_session())
        else:
            ranked = RankedVariants(able, VariantReason.ONLY_ONE)
        return ranked if version is None else RankedVariants(ranked.variants, VariantReason.HEADER)

    def names_of(self, model: str, variant: Variant, demand: RouteDemand) -> Set[str] | None:
        """The instances of `variant` that a request may go to now; None: all that serve `model`."""
        variants = self.view.variants_of(model)
        own = next((each for each in variants if each.key == variant.key), None)
        if own is None:
            return frozenset()
        if demand.hosts:
            return own.among(demand.names_of(self.view.serving_of(model))).instances
        return None if len(variants) == 1 else own.instances

    async def wait_variants(self, model: str, demand: RouteDemand) -> RankedVariants:
        """Where a request with media may go: one at least."""

        def rank() -> RankedVariants | None:
            ranked = self.find_variants(model, demand, has_media=True)
            return ranked if ranked.variants else None

        return await self._wait(model, rank)

    async def wait_instance(self, model: str, variant: Variant, demand: RouteDemand) -> InstanceRecord:
        """An instance for a request with media. No instance is waited for where another variant has one."""

        def choose() -> InstanceRecord | None:
            record = self.router.pick_instance(
                self.view.serving_of(model),
                model=model,
                namespace_digest=variant.namespace_digest,
                exclude=frozenset(),
                now=time.monotonic(),
                only=self.names_of(model, variant, demand),
            )
            if record is None and self.find_variants(model, demand, has_media=True).variants:
                raise self.unknown_model(model)
            return record

        return await self._wait(model, choose)

    async def _wait(self, model: str, choose: Callable[[], Chosen | None]) -> Chosen:
        if (chosen := choose()) is not None:
            return chosen
        try:
            async with asyncio.timeout(self.grace_s):
                while (chosen := choose()) is None:
                    if model not in self.view.models_seen:
                        raise self.unknown_model(model)
                    await self.view.wait_for_refresh()
        except TimeoutError as error:
            raise self.unknown_model(model) from error
        return chosen

    def unknown_model(self, model: str) -> RequestError:
        """For a model that is not served: 404; 503 if it was before, or nothing is served at all."""
        if self.view.models and model not in self.view.models_seen:
            return model_not_found(model)
        return RequestError(503, "no_instance", "no instance that serves this model is available", "model")


@dataclass(slots=True)
class Choice:
    """For one request. No life of an instance is chosen twice; after a restart it is another life.

    Before it gives up it waits for the registry to be read once more: a new instance is not in the view yet.
    """

    instances: Instances
    model: str
    namespace_digest: str | None
    first: InstanceRecord | None = None  # chosen before; taken unless it is leaving meanwhile
    needs_tower: bool = False  # only instances that can encode the request's media themselves
    only: InstanceRecord | None = None  # no other will do
    takes: Modality | None = None  # only instances that take raw items of this modality
    demand: RouteDemand = ANYWHERE
    variant: Variant | None = None  # whose digest is `namespace_digest`; None: text only, any will do
    reason: VariantReason | None = None  # of `variant`; of a text's, once it is chosen
    _tried: set[tuple[str, str]] = field(default_factory=set)  # (instance, boot id)
    _num_failed: int = 0
    _may_refresh: bool = True

    async def next_instance(self) -> InstanceRecord:
        """The instance to send the request to now.

        Raises:
            RequestError: there is none (any more).
        """
        record = self._pick()
        if record is None and self._may_refresh and self.only is None:
            self._may_refresh = False
            view = self.instances.view
            with suppress(TimeoutError):  # Redis is away: the last view is all there is
                async with asyncio.timeout(view.interval_s + REFRESH_LIMIT_S):
                    await view.wait_for_refresh()
            record = self._pick()
        if record is not None:
            self._tried.add((record.instance, record.boot_id))
            return record
        if self._tried:
            raise unavailable("instance_unreachable", "the serving instance cannot be reached")
        raise self.instances.unknown_model(self.model)

    def on_unreachable(self, record: InstanceRecord) -> None:
        """It could not be reached, or went away: a bounded number of times."""
        self._num_failed += 1
        self.instances.router.avoid_instance(record.instance, time.monotonic())

    def on_draining(self) -> None:
        """It did nothing with the request: this costs no attempt."""
        self._may_refresh = True

    def _pick(self) -> InstanceRecord | None:
        if self.only is not None:
            return None if self._tried else self.only
        first, self.first = self.first, None
        records = self.instances.view.records
        if first is not None and not any(r.draining for r in records if r.instance == first.instance):
            return first
        if self._num_failed >= self.instances.max_attempts:
            self._may_refresh = False
            return None
        exclude: Set[str] = frozenset()
        if self._tried:
            exclude = {r.instance for r in records if (r.instance, r.boot_id) in self._tried}
        for only in self._allowed():
            record = self.instances.router.pick_instance(
                self.instances.view.serving_of(self.model),
                model=self.model,
                namespace_digest=self.namespace_digest,
                exclude=exclude,
                now=time.monotonic(),
                needs_tower=self.needs_tower,
                takes=self.takes,
                only=only,
            )
            if record is not None:
                return record
        return None

    def _allowed(self) -> Iterable[Set[str] | None]:
        """Instances by variant, the one that the request gets first. None: all."""
        if self.variant is not None:
            return (self.instances.names_of(self.model, self.variant, self.demand),)
        ranked = self.instances.find_variants(self.model, self.demand, has_media=False)
        self.reason = ranked.reason
        return (each.instances for each in ranked.variants)
