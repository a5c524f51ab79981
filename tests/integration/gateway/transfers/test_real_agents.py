"""A gateway between two hosts: real stores, real fabric agents, a real Redis. Engines are store clients."""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fabric.agent_process import write_fabric_key
from tests.support.fabric.fabric_host import FabricHost
from tests.support.fabric.transports import transports_option
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode, send_encode_needed
from tests.support.gateway.media_samples import data_url, image_bytes
from tests.support.gateway.serving import MODEL
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus
from triptych_common.protocol.messages import ECTransferParams, EncoderCacheMetadata
from triptych_common.protocol.store import Evict, Pinned, Reserved, Unpin, Watching

ANSWER = "1x8x8 word0 word1 word2"


def bytes_of(mm_hash: str, num_bytes: int) -> bytes:
    """What is encoded for an item."""
    return (bytes.fromhex(mm_hash) * (num_bytes // 32 + 1))[:num_bytes]


@dataclass
class Engines:
    """An encoder that writes into the store of `source`, a prefill_decode that reads that of `target`."""

    bus: AsyncBus
    source: FabricHost
    target: FabricHost
    reserved: dict[str, Reserved] = field(default_factory=dict)
    read: dict[str, bytes] = field(default_factory=dict)
    num_needed: int = 0

    async def reserve(self, metadata: EncoderCacheMetadata) -> None:
        self.reserved[metadata.mm_hash] = await asyncio.to_thread(
            self.source.reserve, metadata.mm_hash, metadata.num_bytes
        )

    async def seal(self, metadata: EncoderCacheMetadata) -> None:
        data = bytes_of(metadata.mm_hash, metadata.num_bytes)
        await asyncio.to_thread(self.source.seal, self.reserved.pop(metadata.mm_hash), data)

    async def wait_items(self, params: ECTransferParams) -> None:
        for item in params.items:
            reply = await asyncio.to_thread(self.target.pin_or_watch, item.mm_hash)
            if isinstance(reply, Pinned):
                self.target.session.request(Unpin(seq=0, pin_id=reply.pin_id))
            else:
                assert isinstance(reply, Watching)
                if not reply.writing:
                    self.num_needed += 1
                    await send_encode_needed(self.bus, params.model_copy(update={"items": (item,)}), "pd-0")
                self.read[item.mm_hash] = await asyncio.to_thread(self.target.wait_sealed, item.mm_hash)


@dataclass
class Fabric:
    system: System
    engines: Engines

    async def ask(self, *colors: int) -> httpx.Response:
        urls = [data_url(image_bytes(each)) for each in colors]
        content = [{"type": "image_url", "image_url": {"url": each}} for each in urls]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return await self.system.post(body, timeout=60)


@pytest.fixture
async def fabric(redis_url: str, tmp_path: Path) -> AsyncIterator[Fabric]:
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-fabric-", dir="/dev/shm"))  # a socket's path is short
    key = write_fabric_key(run_dir / "key")
    options = (f"--fabric-key-file={key}", "--fabric-progress-timeout-s=2", transports_option("tcp"))
    hosts = [FabricHost(run_dir / each, redis_url, each, free_port(), *options) for each in ("a", "b")]
    try:
        for host in hosts:
            await asyncio.to_thread(host.start)
        instance = FakePrefillDecode(store=hosts[1].store_name)
        async with opened_system(
            redis_url, tmp_path, instance, encoder_store=hosts[0].store_name, deployment="test"
        ) as system:
            engines = Engines(system.bus, *hosts)
            system.encoder.on_reserve, system.encoder.on_seal = engines.reserve, engines.seal
            instance.waits_for = engines.wait_items
            yield Fabric(system, engines)
    finally:
        for host in hosts:
            host.close()
        shutil.rmtree(run_dir)


def text_of(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


async def test_an_item_is_read_at_another_host_as_it_was_encoded(fabric: Fabric) -> None:
    engines, encoder = fabric.engines, fabric.system.encoder
    assert text_of(await fabric.ask(1)) == ANSWER
    (job,) = encoder.jobs
    assert engines.read == {job.mm_hash: bytes_of(job.mm_hash, 1024)}
    assert text_of(await fabric.ask(1)) == ANSWER
    assert (len(encoder.jobs), len(engines.read)) == (1, 1)
    for host in (engines.source, engines.target):
        await asyncio.to_thread(host.wait_no_leftovers)


async def test_it_comes_again_after_it_was_evicted_there(fabric: Fabric) -> None:
    engines, encoder = fabric.engines, fabric.system.encoder
    await fabric.ask(1)
    mm_hash = encoder.jobs[0].mm_hash
    await asyncio.to_thread(engines.target.session.request, Evict(seq=0, mm_hash=mm_hash))
    engines.read.clear()
    assert text_of(await fabric.ask(1)) == ANSWER
    assert engines.read == {mm_hash: bytes_of(mm_hash, 1024)}
    assert (encoder.num_encodes, len(encoder.jobs)) == (1, 1)


async def test_without_the_agent_of_the_target_there_is_one_error_and_nothing_left(fabric: Fabric) -> None:
    engines = fabric.engines
    engines.target.kill_agent()
    answer = await fabric.ask(1)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "transfer_failed")
    await asyncio.to_thread(engines.source.wait_no_leftovers)
    await until(lambda: not len(fabric.system.gateway.transfers.table))
    engines.target.agent.start()
    # What its prefill_decode waited for is not waited for any more: the fake asks anew.

    async def is_answered() -> bool:
        return (await fabric.ask(2)).status_code == 200

    await until_async(is_answered)
