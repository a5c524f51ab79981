"""Two versions of a model, of which one is served by a pair; and front ends that name the halves of pairs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.gateway.stages.conftest import Staged
from tests.support.gateway.fake_encoder import FakeEncoder
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.fake_stages import FakeDecode, FakePrefill
from tests.support.gateway.samples import MODEL, image_part
from tests.support.gateway.system import System, opened_system
from tests.support.waiting import until

OTHER = "a" * 64  # the namespace of the second version
NUM_REQUESTS = 6


@dataclass
class Versions:
    """The system's `prefill_decode` is version 1; a pair is version 2."""

    system: System
    encoder: FakeEncoder  # of version 2
    prefill: FakePrefill
    decode: FakeDecode
    prefill_stack: AsyncExitStack  # closed: the half that prefills has left
    models_file: Path

    async def set_shares(self, **shares: int) -> None:
        content = {MODEL: {name.removeprefix("v"): weight for name, weight in shares.items()}}
        new = self.models_file.with_suffix(".new")
        new.write_text(yaml.safe_dump({"shares": content}))
        new.rename(self.models_file)
        models = self.system.gateway.services.instances.models
        await until(lambda: models.content.shares == content)

    async def ask_all(self) -> None:
        """New conversations, with media and without."""
        for number in range(NUM_REQUESTS):
            answer = await self.system.post(body(f"talk {number}", number if number % 2 else None))
            assert answer.status_code == 200, answer.text

    def counts(self) -> tuple[int, int, int]:
        """Requests that version 1, and both halves of version 2 were sent."""
        return len(self.system.prefill_decode.bodies), len(self.prefill.bodies), len(self.decode.bodies)


def body(text: str, color: int | None = None) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if color is not None:
        content.insert(0, image_part(color))
    return {"model": MODEL, "messages": [{"role": "user", "content": content}]}


@asynccontextmanager
async def versions(redis_url: str, run_dir: Path) -> AsyncIterator[Versions]:
    path = run_dir / "models.yaml"
    path.write_text(yaml.safe_dump({"shares": {MODEL: {"1": 100, "2": 0}}}))
    first = FakePrefillDecode(model_version="1")
    prefill = FakePrefill(digest=OTHER, model_version="2")
    decode = FakeDecode(digest=OTHER, model_version="2", prefills=[prefill])
    async with (
        opened_system(redis_url, run_dir, first, models_file=path, models_check_s=0.05) as system,
        FakeEncoder(system.bus, "encoder-1", OTHER).running() as encoder,
        decode.running(system.bus),
        AsyncExitStack() as stack,
    ):
        await stack.enter_async_context(prefill.running(system.bus))
        await system.refresh()
        yield Versions(system, encoder, prefill, decode, stack, path)


async def test_shares_of_a_version_that_is_a_pair(redis_url: str, tmp_path: Path) -> None:
    async with versions(redis_url, tmp_path) as served:
        await served.ask_all()
        assert served.counts() == (NUM_REQUESTS, 0, 0)
        await served.set_shares(v1=0, v2=100)
        await served.ask_all()
        assert served.counts() == (NUM_REQUESTS, NUM_REQUESTS, NUM_REQUESTS)
        assert len(served.decode.taken) == NUM_REQUESTS
        own = {job.mm_hash for job in served.system.encoder.jobs}
        others = {job.mm_hash for job in served.encoder.jobs}
        assert len(own) == len(others) == NUM_REQUESTS // 2
        assert own.isdisjoint(others), "the same images, named for another version"
        metrics = (await served.system.http.get("/metrics")).text
        for version in ("1", "2"):
            labels = f'model="{MODEL}",reason="only_one",version="{version}"'
            assert f"version_answers_total{{{labels}}} {NUM_REQUESTS}.0" in metrics


async def test_a_conversation_that_an_instance_holds_moves_with_the_shares(
    redis_url: str, tmp_path: Path
) -> None:
    """The instance that has decoded it is of the version that gets nothing any more."""
    async with versions(redis_url, tmp_path) as served:
        await served.set_shares(v1=0, v2=100)
        turns = body("hello")
        assert (await served.system.post(turns)).status_code == 200
        turns["messages"] += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        assert (await served.system.post(turns)).status_code == 200
        assert served.counts() == (0, 1, 2), "decoded where it is held"
        await served.set_shares(v1=100, v2=0)
        assert (await served.system.post(turns)).status_code == 200
        assert served.counts() == (1, 1, 2)


async def test_what_is_not_divided_goes_to_the_version_that_has_an_instance_for_it(
    redis_url: str, tmp_path: Path
) -> None:
    async with versions(redis_url, tmp_path) as served:
        await served.set_shares(v1=1, v2=1_000_000)
        for color in (None, 1):
            answer = await served.system.post({**body("hello", color), "n": 2, "temperature": 1.0})
            assert answer.status_code == 200, answer.text
        num_whole, num_prefills, _ = served.counts()
        assert (num_whole, num_prefills) == (1, 0), "a text is decoded alone, an image needs both stages"


async def test_a_half_of_the_pair_leaves_before_the_dispatch(redis_url: str, tmp_path: Path) -> None:
    """A version without a pair is none: the request is done again in the other one."""
    async with versions(redis_url, tmp_path) as served:
        await served.set_shares(v1=1, v2=1_000_000)
        served.encoder.before_metadata.clear()
        asking = asyncio.get_running_loop().create_task(served.system.post(body("what is it", 1)))
        await until(lambda: bool(served.encoder.jobs))
        await served.prefill_stack.aclose()
        await served.system.refresh()
        served.encoder.before_metadata.set()
        answer = await asking
        assert answer.status_code == 200, answer.text
        assert served.counts() == (1, 0, 0)
        metrics = (await served.system.http.get("/metrics")).text
        assert f'version_answers_total{{model="{MODEL}",reason="left",version="1"}} 1.0' in metrics


@pytest.mark.parametrize("staged", [{"front_end_networks": ("127.0.0.0/8",)}], indirect=True)
async def test_halves_named_by_a_front_end(staged: Staged) -> None:
    prefill, decode = await staged.another_prefill(), await staged.another_decode()
    whole = await staged.stack.enter_async_context(FakePrefillDecode("pd-1").running(staged.system.bus))
    await staged.system.refresh()

    def at(fake: FakePrefillDecode) -> str:
        return f"127.0.0.1:{fake.port}"

    async def ask(number: int, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await staged.system.post(body(f"talk {number}", number), headers=named)

    for number in range(3):
        answer = await ask(number, x_prefiller_host_port=at(prefill))
        assert answer.status_code == 200, answer.text
    assert (len(prefill.bodies), len(staged.prefill.bodies), len(whole.bodies)) == (3, 0, 0)
    for number in range(3, 6):
        both = {"x_prefiller_host_port": at(staged.prefill), "x_data_parallel_host_port": at(decode)}
        assert (await ask(number, **both)).status_code == 200
    assert len(staged.prefill.bodies) == 3
    assert len(decode.taken) >= 3
    assert (await ask(6, x_data_parallel_host_port=at(whole))).status_code == 200
    assert len(whole.bodies) == 1
    for unknown in (
        {"x_prefiller_host_port": at(decode)},  # of the other stage
        {"x_data_parallel_host_port": at(prefill)},
        {"x_prefiller_host_port": at(prefill), "x_data_parallel_host_port": at(whole)},
    ):
        refused = await ask(7, **unknown)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unknown_instance")
