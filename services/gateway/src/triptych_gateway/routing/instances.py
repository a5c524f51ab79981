"""The prefill_decodes that one request may go to: waits for one, chooses it, and the next after a failure."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import InstanceRecord, Modality
from triptych_gateway.errors import model_not_found, unavailable
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import TOWER_ROLES, Router
from triptych_gateway.routing.scheduling.candidates import RoutingRequest

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
        models = [each for each in self.view.default_models if may_use(each)]
        if len(models) > 1:
            raise RequestError(400, "missing_field", "model is missing, and several are served", "model")
        if not models:
            raise self.unknown_model("")
        return models[0]

    def encodes_sounds(self, model: str) -> bool:
        """Whether an instance that serves `model` takes raw sounds."""
        records = self.view.serving_of(model)
        return any(r.role in TOWER_ROLES and r.item_limits.get(Modality.AUDIO, 0) for r in records)

    async def wait_namespace(self, model: str) -> str:
        """The namespace digest for the model's images."""
        return await self._wait(model, lambda: self.view.namespace_of(model))

    async def wait_instance(
        self, model: str, namespace_digest: str, routing: RoutingRequest | None = None
    ) -> InstanceRecord:
        """An instance for a request with images."""
        return await self._wait(
            model,
            lambda: self.router.pick_instance(
                self.view.serving_of(model),
                model=model,
                namespace_digest=namespace_digest,
                exclude=frozenset(),
                now=time.monotonic(),
                routing=routing,
            ),
        )

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
    routing: RoutingRequest | None = None  # what else the choice may go by
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
        return self.instances.router.pick_instance(
            self.instances.view.serving_of(self.model),
            model=self.model,
            namespace_digest=self.namespace_digest,
            exclude={r.instance for r in records if (r.instance, r.boot_id) in self._tried}
            if self._tried
            else frozenset(),
            now=time.monotonic(),
            needs_tower=self.needs_tower,
            takes=self.takes,
            routing=self.routing,
        )
