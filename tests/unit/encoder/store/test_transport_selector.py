"""The encoder puts tensors where its consumers can read them, and where the store has room."""

import asyncio
from typing import Any

import pytest

from triptych_common.domain.errors import BusUnavailableError, StoreFullError
from triptych_common.domain.transports import StoreSlab
from triptych_common.protocol.messages import InstanceRecord, Role, Transport
from triptych_common.protocol.store import (
    AlreadySealed,
    Reserve,
    Reserved,
    StoreFailure,
    StoreReply,
    TensorSpec,
)
from triptych_encoder.store import store_client as module
from triptych_encoder.store.store_client import StoreClient, TransportSelector
from triptych_vllm_connector.host.slab_watch import announced_capabilities
from triptych_vllm_connector.slab_probe import SlabProbeResult

GPU = "GPU-00000000-0000-0000-0000-00000000000a"
SLAB = StoreSlab(f"cuda:{GPU}", generation=7)
DIGEST = "d" * 64
SPEC = TensorSpec(shape=(1, 2), dtype="float16", num_bytes=4)


def consumer(*transports: Transport, **fields: Any) -> InstanceRecord:
    return InstanceRecord.model_validate(
        {
            "instance": "pd-0",
            "boot_id": "b",
            "role": Role.PREFILL_DECODE,
            "namespace_digest": DIGEST,
            "transports": transports,
            **fields,
        }
    )


class FakeRegistry:
    def __init__(self) -> None:
        self.records: list[InstanceRecord] = []
        self.is_away = False
        self.num_looks = 0

    async def list_instances(self) -> list[InstanceRecord]:
        self.num_looks += 1
        if self.is_away:
            raise BusUnavailableError("away")
        return self.records


def make(registry: FakeRegistry, setting: Any = "auto", store: str | None = None) -> TransportSelector:
    own = announced_capabilities(setting, slab=SlabProbeResult(GPU, generation=7), has_region=True)
    return TransportSelector(lambda: own, DIGEST, registry, lambda: SLAB, store)


async def test_consumers_of_this_namespace_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_INTERVAL_S", 0.0)
    registry = FakeRegistry()
    both = make(registry)
    on_gpu = consumer(*Transport, device=GPU, slab_generation=7)
    registry.records = [on_gpu, consumer(Transport.REDIS, namespace_digest="e" * 64)]
    assert (await both.memories())[0] == SLAB.memory
    registry.records = [on_gpu, consumer(*Transport, device=GPU, slab_generation=6)]
    assert await both.memories() == ["shm"], "of the store before"
    registry.records = [on_gpu, consumer(Transport.PINNED_SHM)]
    assert await both.memories() == ["shm"]
    registry.is_away = True
    assert await both.memories() == ["shm"], "what was known last"


async def test_the_registry_is_not_asked_for_every_job() -> None:
    registry = FakeRegistry()
    auto, fixed = make(registry), make(registry, "redis")
    for _ in range(3):
        await auto.memories()
        assert await fixed.memories() == ["redis"]
    assert registry.num_looks == 1


class FakeSession:
    """A store whose slab refuses a few times, and whose region may be full."""

    def __init__(self) -> None:
        self.full = {SLAB.memory}
        self.asked: list[str] = []

    def submit(self, command: Reserve) -> "asyncio.Future[StoreReply]":
        self.asked.append(command.memory)
        future: asyncio.Future[StoreReply] = asyncio.get_running_loop().create_future()
        if command.memory in self.full:
            future.set_result(StoreFailure(seq=1, code="full", detail="no room"))
        else:
            future.set_result(
                Reserved(seq=1, reservation_id=1, offset=0, generation=1, memory=command.memory)
            )
        return future


async def test_a_full_slab_is_passed_over_and_a_full_region_reported() -> None:
    session = FakeSession()
    store_client = StoreClient("encoder-0", session, asyncio.Event())

    async def reserve() -> Reserved | AlreadySealed:
        return await store_client.reserve_blocks(
            "ab" * 32, SPEC, may_use_reserve=False, memories=[SLAB.memory, "shm"], timeout_s=5.0
        )

    reply = await reserve()
    assert isinstance(reply, Reserved)
    assert reply.memory == "shm"
    session.full = {"shm", SLAB.memory}
    session.asked.clear()
    with pytest.raises(StoreFullError):
        await reserve()
    session.full = {"shm"}
    reply = await reserve()
    assert isinstance(reply, Reserved)
    assert session.asked == [SLAB.memory, "shm", SLAB.memory], "each try begins with the best"
    assert reply.memory == SLAB.memory


@pytest.mark.parametrize("setting", ["auto", "cuda_ipc"])
async def test_a_consumer_with_another_store_gets_the_region(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(module, "REFRESH_INTERVAL_S", 0.0)
    registry = FakeRegistry()
    selector = make(registry, setting, "store-a")
    near = consumer(*Transport, device=GPU, slab_generation=7, store="store-a")
    registry.records = [near]
    assert (await selector.memories())[0] == SLAB.memory
    registry.records = [near, consumer(*Transport, device=GPU, slab_generation=7, store="store-b")]
    assert await selector.memories() == ["shm"]
