"""A gateway between hosts: fake stores and agents, encoders at one store, a prefill_decode at another."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.gateway.fake_fabric import FakeAgent, FakeStores
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.samples import MODEL, image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until_async
from triptych_common.coordination import EntryDirectory
from triptych_common.protocol.ids import MmHash
from triptych_common.protocol.messages import ECTransferParams

ENCODERS, TARGET, OTHER = "store-0", "store-b", "store-c"
ANSWER = "1x8x8 word0 word1 word2"


def body(*colors: int, **fields: Any) -> dict[str, Any]:
    content = [image_part(each) for each in colors]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@dataclass
class Hosts:
    """Encoders at `ENCODERS`, one prefill_decode at `TARGET`."""

    system: System
    stores: FakeStores
    stack: AsyncExitStack
    agents: dict[str, FakeAgent]

    @property
    def source(self) -> FakeAgent:
        return self.agents[ENCODERS]

    @property
    def directory(self) -> EntryDirectory:
        return EntryDirectory(self.system.bus, max_items=100, ttl_s=60)

    async def add_agent(self, store: str, **fields: Any) -> FakeAgent:
        agent = FakeAgent(self.system.bus, self.stores, store, **fields)
        self.agents[store] = await self.stack.enter_async_context(agent.running())
        await self.system.refresh()
        return agent

    async def add_instance(self, name: str, store: str) -> FakePrefillDecode:
        instance = self.waiting(FakePrefillDecode(name=name, store=store))
        await self.stack.enter_async_context(instance.running(self.system.bus))
        await self.system.refresh()
        return instance

    def waiting(self, instance: FakePrefillDecode) -> FakePrefillDecode:
        """It waits for the items that its store lacks."""

        async def wait(params: ECTransferParams) -> None:
            await self.stores.wait_items(self.system.bus, params, instance.name, instance.store or "")

        instance.waits_for = wait
        return instance

    async def places_of(self, mm_hash: str) -> set[str]:
        found = await self.directory.find([MmHash(mm_hash)])
        return {each.store for each in found.get(MmHash(mm_hash), ())}

    @property
    def num_encodes(self) -> int:
        return self.system.encoder.num_encodes


@asynccontextmanager
async def opened_hosts(
    redis_url: str, run_dir: Path, agents: tuple[str, ...] = (ENCODERS, TARGET), **changes: Any
) -> AsyncIterator[Hosts]:
    async with (
        opened_system(redis_url, run_dir, FakePrefillDecode(store=TARGET), **changes) as system,
        AsyncExitStack() as stack,
    ):
        hosts = Hosts(system, FakeStores(), stack, {})
        system.encoder.sealed = hosts.stores.held[ENCODERS]
        hosts.waiting(system.prefill_decode)
        for each in agents:
            await hosts.add_agent(each)
        yield hosts


async def until_places(hosts: Hosts, mm_hash: str, stores: set[str]) -> None:
    async def are_there() -> bool:
        return await hosts.places_of(mm_hash) == stores

    await until_async(are_there)


async def evict_at_target(hosts: Hosts) -> None:
    """What was pushed there is there no more, and the directory still says that it is."""
    entries = [entry for order in hosts.source.orders for entry in order.entries]

    async def are_noted() -> bool:
        return all([{ENCODERS, TARGET} <= await hosts.places_of(each) for each in entries])

    await until_async(are_noted)
    hosts.stores.held[TARGET].clear()
