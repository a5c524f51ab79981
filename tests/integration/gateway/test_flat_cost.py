"""What a request asks of Redis does not grow with the number of instances. By counting commands, not time."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio.connection import AbstractConnection

from tests.support.gateway.samples import MODEL, image_part
from tests.support.gateway.system import System, opened_system
from triptych_common.coordination import Registry
from triptych_gateway.routing import registry_view
from triptych_gateway.routing.variants import Variant, variants_of

NUM_REQUESTS = 12
MANY = 64
TTL_S = 60.0
TIMED = ("XREADGROUP", "XACK", "XDEL", "XAUTOCLAIM", "CLIENT")  # so many as time makes of them


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, client_name: str) -> Iterator[Counter[str]]:
    """The commands that one process' clients send to Redis; those of a pipeline each."""
    commands: Counter[str] = Counter()
    send, pack = AbstractConnection.send_command, AbstractConnection.pack_commands

    async def send_command(self: AbstractConnection, *args: Any, **options: Any) -> None:
        if self.client_name == client_name:
            commands[_name(args)] += 1
        await send(self, *args, **options)

    def pack_commands(self: AbstractConnection, several: Any) -> Any:
        several = list(several)
        if self.client_name == client_name:
            commands.update(_name(args) for args in several)
        return pack(self, several)

    with monkeypatch.context() as patched:
        patched.setattr(AbstractConnection, "send_command", send_command)
        patched.setattr(AbstractConnection, "pack_commands", pack_commands)
        yield commands


def _name(args: Any) -> str:
    name = args[0].decode() if isinstance(args[0], bytes) else str(args[0])
    return name.split(" ")[0].upper()


@asynccontextmanager
async def instances(redis_url: str, run_dir: Path, number: int) -> AsyncIterator[System]:
    """One of each that works, and records of others: all prefill_decodes have the address of the one.

    Neither the registry is read nor a heartbeat sent while the requests are counted.
    """
    async with opened_system(redis_url, run_dir, registry_interval_s=TTL_S) as system:
        registry = Registry(system.bus)
        for index in range(1, number):
            for record in (system.encoder.record(), system.prefill_decode.record()):
                name = f"{record.instance.rpartition('-')[0]}-{index}"
                await registry.register(record.model_copy(update={"instance": name}), ttl_s=TTL_S)
        await system.refresh()
        yield system


async def ask_with_images(system: System, number: int) -> None:
    """Each with an image that is new."""
    for color in range(number):
        image = image_part(color)
        await system.ask([image, {"type": "text", "text": "what is it"}])


async def commands_of_requests(
    redis_url: str, run_dir: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    async with instances(redis_url, run_dir, number) as system:
        assert len(system.gateway.view.serving) == number
        assert len(system.gateway.view.encoding) == number
        with counted(monkeypatch, system.gateway.settings.instance) as commands:
            await ask_with_images(system, NUM_REQUESTS)
        used = {body["ec_transfer_params"]["items"][0]["mm_hash"] for body in system.prefill_decode.bodies}
        assert len(used) == NUM_REQUESTS
        await system.bus.client.flushdb()  # what the one asked is new to the other
    return commands


async def test_commands_of_a_request_are_as_many_with_many_instances(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = await commands_of_requests(redis_url, tmp_path, 1, monkeypatch)
    many = await commands_of_requests(redis_url, tmp_path, MANY, monkeypatch)
    for name in TIMED:
        del few[name], many[name]
    assert few.total() >= NUM_REQUESTS
    assert many.total() <= 1.5 * few.total(), f"with one: {dict(few)}; with {MANY}: {dict(many)}"


async def test_the_registry_is_read_in_two_commands(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with instances(redis_url, tmp_path, MANY) as system:
        with counted(monkeypatch, system.gateway.settings.instance) as commands:
            await system.refresh()
        assert (commands["ZRANGE"], commands["MGET"]) == (1, 1)
        assert commands["GET"] == commands["SCAN"] == commands["KEYS"] == 0


async def test_text_asks_nothing_of_redis(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heartbeats go on meanwhile."""
    async with instances(redis_url, tmp_path, MANY) as system:
        with counted(monkeypatch, system.gateway.settings.instance) as commands:
            for _ in range(NUM_REQUESTS):
                await system.ask("hello")
    assert commands["EVALSHA"] == commands["XADD"] == commands["HGET"] == 0


async def test_records_are_sorted_out_once_for_each_read_of_the_registry(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_sorted = 0

    def counting(*arguments: Any) -> tuple[Variant, ...]:
        nonlocal num_sorted
        num_sorted += 1
        return variants_of(*arguments)

    monkeypatch.setattr(registry_view, "variants_of", counting)
    async with instances(redis_url, tmp_path, MANY) as system:
        num_sorted = 0
        await ask_with_images(system, NUM_REQUESTS)
        assert num_sorted == 1
        assert len(system.gateway.view.serving_of(MODEL)) == MANY
        await system.refresh()
        await ask_with_images(system, NUM_REQUESTS)
        assert num_sorted == 2
        assert system.gateway.view.serving_of("no such model") == ()
        assert system.gateway.view.variants_of("no such model") == ()
        assert num_sorted == 2
