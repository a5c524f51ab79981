"""LoRA adapters, announced in the instance's record, so that gateways send it requests that name one.

    loaded at the start (`--lora-modules`), loaded or unloaded later --> table --changed--> record

vLLM loads them at run time where `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set, by requests to this instance's
own port. Nothing polls the names: vLLM keeps them in a table, which `AdapterTable` replaces.
"""

import asyncio
from contextlib import suppress
from typing import Any

from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import MAX_ADAPTER_CHARS, MAX_ADAPTERS
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.seams.replacing import replace

log = get_logger(__name__)


class AdapterTable(dict[str, Any]):
    """vLLM's `LoRARequest`s by name; `changed` is set when one is added or removed."""

    def __init__(self, loaded: dict[str, Any]) -> None:
        super().__init__(loaded)
        self.changed = asyncio.Event()

    @classmethod
    def of(cls, models: Any) -> "AdapterTable":
        """Replace the table that vLLM's `OpenAIServingModels` made."""
        table = cls(models.lora_requests)
        users = (OpenAIServingModels.load_lora_adapter, OpenAIServingModels.unload_lora_adapter)
        replace(models, "lora_requests", table, used_by=users)
        return table

    def __setitem__(self, name: str, adapter: Any) -> None:
        super().__setitem__(name, adapter)
        self.changed.set()

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed.set()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that can be announced, limited in length and number."""
        fitting = sorted(name for name in self if 0 < len(name) <= MAX_ADAPTER_CHARS)[:MAX_ADAPTERS]
        if len(fitting) < len(self):
            log.warning("LoRA adapters not announced", num_adapters=len(self) - len(fitting))
        return tuple(fitting)


async def announce_adapters(table: AdapterTable, registration: Registration) -> None:
    """Update the instance's record with each change, until cancelled."""
    while True:
        await table.changed.wait()
        table.changed.clear()
        names = table.names
        if names != registration.record.adapters:
            with suppress(BusUnavailableError):  # it goes out with the next heartbeat
                await registration.update(adapters=names)
            log.info("LoRA adapters announced", adapters=names)
