"""HTTP server of a prefill_decode with any engine: start of listening, and drain.

    serving --stop--> announced, refusing --last request ended, or the time is over--> drained

Announced first: a gateway whose request is refused chooses another instance, and must not choose this one.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import uvicorn
from vllm.entrypoints.openai.models.serving import OpenAIServingModels

from triptych_common.coordination import Registration
from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import MAX_ADAPTER_CHARS, MAX_ADAPTERS
from triptych_common.runtime.drain import AsgiApp, DrainGate
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.seams.replacing import replace

log = get_logger(__name__)

UNGUARDED_PATHS = frozenset({"/health", "/metrics", "/ping", "/status", "/version"})


class AdapterTable(dict[str, Any]):
    """vLLM's `LoRARequest`s by name; `changed` is set when one is added or removed.

        loaded at the start (`--lora-modules`), loaded or unloaded later --> table --changed--> record

    vLLM loads adapters at run time where `VLLM_ALLOW_RUNTIME_LORA_UPDATING` is set, by requests to this
    instance's own port. Nothing polls the names: this table replaces the one in which vLLM keeps them.
    """

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


class ListeningServer(uvicorn.Server):
    """Server without signal handlers; `listening` is set when connections are accepted."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def guarded(app: AsgiApp) -> DrainGate:
    """Wrap `app` so that its requests are counted and, while draining, refused, except reads of its state."""
    return DrainGate(app, lambda path: path not in UNGUARDED_PATHS)


async def drain(registration: Registration, gate: DrainGate, timeout_s: float) -> None:
    """Return when no request runs any more, or after `timeout_s`; the caller cuts off the rest."""
    await registration.announce_draining()
    gate.refuse()
    log.info("draining", num_requests=gate.num_requests)
    try:
        async with asyncio.timeout(timeout_s):
            await gate.wait_idle()
    except TimeoutError:
        log.warning("drain timeout: requests cut off", num_requests=gate.num_requests)
