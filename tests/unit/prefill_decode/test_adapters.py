"""LoRA adapters in the instance's record: there at the start, and changed when vLLM loads or drops one."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.domain.errors import BusUnavailableError
from triptych_common.protocol.messages import InstanceRecord, Role
from triptych_prefill_decode.http_server import AdapterTable, announce_adapters


class Registered:
    """A `Registration`, of which `announced` holds what was published; Redis may be away."""

    def __init__(self) -> None:
        self.record = InstanceRecord(instance="pd-0", boot_id="b", role=Role.PREFILL_DECODE)
        self.announced: asyncio.Queue[tuple[str, ...]] = asyncio.Queue()
        self.is_away = False

    async def update(self, **changes: Any) -> None:
        self.record = self.record.model_copy(update=changes)
        self.announced.put_nowait(self.record.adapters)
        if self.is_away:
            raise BusUnavailableError("away")


def table_of(*names: str) -> tuple[Any, AdapterTable]:
    models = SimpleNamespace(lora_requests={name: object() for name in names})
    return models, AdapterTable.of(models)


async def test_vllm_keeps_what_it_loaded_at_its_start() -> None:
    models, table = table_of("french", "dutch")
    assert models.lora_requests is table
    assert table.names == ("dutch", "french")
    assert not table.changed.is_set()


@pytest.mark.parametrize("is_away", [False, True])
async def test_what_comes_and_goes_is_announced(is_away: bool) -> None:
    models, table = table_of("dutch")
    registration: Any = Registered()
    registration.is_away = is_away
    registration.record = registration.record.model_copy(update={"adapters": table.names})
    task = asyncio.get_running_loop().create_task(announce_adapters(table, registration))
    try:
        async with asyncio.timeout(10):
            models.lora_requests["french"] = object()
            assert await registration.announced.get() == ("dutch", "french")
            del models.lora_requests["dutch"]
            assert await registration.announced.get() == ("french",)
            models.lora_requests["french"] = object()  # loaded again, in its place
            models.lora_requests["greek"] = object()
            assert await registration.announced.get() == ("french", "greek")
        assert registration.announced.empty()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_names_that_no_record_holds_are_left_out() -> None:
    _, table = table_of("good", "x" * 201)
    assert table.names == ("good",)
    _, many = table_of(*(f"adapter-{index:04}" for index in range(1200)))
    assert len(many.names) == 1000
