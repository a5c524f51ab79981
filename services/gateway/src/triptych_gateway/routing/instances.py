"""The instances that requests go to, and how long a request waits for one."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from triptych_common.domain.errors import RequestError
from triptych_common.protocol.messages import Modality
from triptych_gateway.errors import model_not_found
from triptych_gateway.routing.registry_view import RegistryView
from triptych_gateway.routing.router import TOWER_ROLES, Router

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

    async def wait_chosen(self, model: str, choose: Callable[[], Chosen | None]) -> Chosen:
        """What `choose` finds for the model, once it does."""
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
