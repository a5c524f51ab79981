"""Time until everything of a request is given back after its client disconnects. Real engines.

    python benchmarks/cancellation.py [--rounds 10] [--json FILE]

One system (one encoder with two slots, made slow on purpose; one prefill_decode with space for one image),
and requests that are left at one stage each:

    queued     its job stands behind two others: the job goes, with the flight
    encoding   its image is being encoded: vLLM's request goes, and the watch; the encode ends into the cache
    granted    it has the only space: the request that waits for it gets it
    decoding   it is streaming: vLLM's request goes, and with it the image's pin

Milliseconds from the close of the connection. The state is read from outside, every 5 ms. Exit
status 1 if something was not given back at all.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import redis.asyncio as redis
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support.fast.redis_inspection import registered_records  # noqa: E402
from tests.support.real import inspection  # noqa: E402
from tests.support.real.system import MODEL, System, image_part, load_strips, running_system  # noqa: E402
from triptych_common.protocol.names import StreamNames  # noqa: E402
from triptych_common.protocol.store import StatsQuery, StoreStats  # noqa: E402
from triptych_common.store_session import AsyncStoreSession  # noqa: E402

ENCODE_DELAY_S = 3.0
NUM_SLOTS = 2
BUDGET_EMBEDS = 12  # one strip of three digits
LOOK_S = 0.005
LIMIT_S = 30.0
QUESTION = {"type": "text", "text": "read the digits"}


class StateReader:
    """Reads from outside what the system holds."""

    def __init__(self, system: System, bus: "redis.Redis", store: AsyncStoreSession) -> None:
        self._bus: Any = bus
        self._names = StreamNames(inspection.DEPLOYMENT)
        self._store = store
        self._http = httpx.AsyncClient(trust_env=False, timeout=5.0)
        self._gateway = httpx.URL(system.base_url).join("/metrics")
        records = registered_records(
            inspection.redis_url(system), inspection.DEPLOYMENT, ["prefill_decode-0"]
        )
        self._engine = httpx.URL(records["prefill_decode-0"]["url"]).join("/metrics")

    async def close(self) -> None:
        await self._http.aclose()

    async def gateway_requests(self) -> int:
        return await self._sum(self._gateway, "triptych_gateway_requests_in_flight")

    async def engine_requests(self) -> int:
        return await self._sum(self._engine, "vllm:num_requests_running", "vllm:num_requests_waiting{")

    async def jobs(self) -> int:
        streams = [key async for key in self._bus.scan_iter(match=self._names.encode_jobs("*", "*"))]
        return sum([int(await self._bus.xlen(stream)) for stream in streams])

    async def flights(self) -> int:
        return len([key async for key in self._bus.scan_iter(match=self._names.inflight("*", "*"))])

    async def store(self) -> StoreStats:
        return cast("StoreStats", await self._store.request(StatsQuery(seq=0)))

    async def is_idle(self) -> bool:
        stats = await self.store()
        held = stats.num_pins + stats.num_watches + stats.num_reservations
        return not held + await self.gateway_requests() + await self.engine_requests() + await self.jobs()

    async def _sum(self, url: httpx.URL, *names: str) -> int:
        lines = (await self._http.get(url)).text.splitlines()
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names)))


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> float:
    """Wait for `condition`; returns the monotonic second at which it held.

    Raises:
        TimeoutError: not in time.
    """
    deadline = time.monotonic() + LIMIT_S
    while True:
        if await condition():
            return time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {LIMIT_S} s: {what}")
        await asyncio.sleep(LOOK_S)


class Caller:
    """Clients of one gateway; every request has a new image."""

    def __init__(self, system: System, num_images: int) -> None:
        self._openai = AsyncOpenAI(
            base_url=system.base_url, api_key="none", max_retries=0, timeout=LIMIT_S * 2,
            http_client=DefaultAsyncHttpxClient(trust_env=False),
        )  # fmt: skip
        strips = load_strips().held_out_strips(num_images * 4, seed=71)
        self._strips = iter([strip for strip in strips if len(strip.digits.split()) == 3])

    async def close(self) -> None:
        await self._openai.close()

    def send(self, started: asyncio.Event | None = None, max_tokens: int = 8) -> "asyncio.Task[str]":
        """Start a request; returns its id. Cancelling the task closes the connection. `started` is set at the
        third token."""
        return asyncio.get_running_loop().create_task(self._ask(next(self._strips).png, started, max_tokens))

    async def _ask(self, png: bytes, started: asyncio.Event | None, max_tokens: int) -> str:
        messages: Any = [{"role": "user", "content": [image_part(png), QUESTION]}]
        create = self._openai.chat.completions.with_streaming_response.create(
            model=MODEL.name, messages=messages, max_tokens=max_tokens, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        async with create as response:
            num_tokens = 0
            async for _ in await response.parse():
                num_tokens += 1
                if num_tokens == 3 and started is not None:
                    started.set()
            return response.headers["x-request-id"]


async def leave(*tasks: "asyncio.Task[str]") -> float:
    """Close the connections; returns the monotonic second of that."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return time.monotonic()


# ---- the stages ----------------------------------------------------------------------------------
async def queued(caller: Caller, state: StateReader) -> dict[str, float]:
    others = [caller.send() for _ in range(NUM_SLOTS)]
    await until(lambda: _is(state.flights, NUM_SLOTS), "the others are under way")
    await until(lambda: _has(state, num_reservations=NUM_SLOTS), "both slots are taken")
    victim = caller.send()
    await until(lambda: _is(state.jobs, NUM_SLOTS + 1), "its job is queued")
    left = await leave(victim)
    gone = await _all(
        job=until(lambda: _is(state.jobs, NUM_SLOTS), "its job goes"),
        flight=until(lambda: _is(state.flights, NUM_SLOTS), "its flight goes"),
        gateway=until(lambda: _is(state.gateway_requests, NUM_SLOTS), "the gateway forgets it"),
    )
    await asyncio.gather(*others)
    return {what: at - left for what, at in gone.items()}


async def encoding(caller: Caller, state: StateReader) -> dict[str, float]:
    victim = caller.send()
    await until(lambda: _has(state, num_reservations=1, num_watches=2), "its image is being encoded")
    await until(lambda: _is(state.engine_requests, 1), "vLLM has it")
    left = await leave(victim)
    gone = await _all(
        engine=until(lambda: _is(state.engine_requests, 0), "vLLM forgets it"),
        watch=until(lambda: _has_at_most_one_watch(state), "prefill_decode's watch ends"),
        gateway=until(lambda: _is(state.gateway_requests, 0), "the gateway forgets it"),
    )
    if not await _has(state, num_reservations=1):
        raise RuntimeError("the encode ended before the state was read")
    return {what: at - left for what, at in gone.items()}


async def granted(caller: Caller, state: StateReader, system: System) -> dict[str, float]:
    has_space = caller.send()
    await until(lambda: _has(state, num_watches=2), "the first one has the space")
    waits = caller.send()
    await until(lambda: _has(state, num_reservations=2), "the second image is announced")
    await until(lambda: _is(state.engine_requests, 2), "vLLM has both")
    left_ns = time.time_ns() - time.monotonic_ns() + int(await leave(has_space) * 1e9)
    request_id = await waits
    spans = await asyncio.to_thread(system.trace, request_id, "prefill.preallocate")
    granted_ns = next(span.end_ns for span in spans if span.name == "prefill.preallocate")
    return {"space": (granted_ns - left_ns) / 1e9}


async def decoding(caller: Caller, state: StateReader) -> dict[str, float]:
    started = asyncio.Event()
    victim = caller.send(started, max_tokens=1500)
    await asyncio.wait_for(started.wait(), LIMIT_S)
    left = await leave(victim)
    gone = await _all(
        engine=until(lambda: _is(state.engine_requests, 0), "vLLM forgets it"),
        pins=until(lambda: _has(state, num_pins=0), "no pin is left"),
        gateway=until(lambda: _is(state.gateway_requests, 0), "the gateway forgets it"),
    )
    return {what: at - left for what, at in gone.items()}


async def _is(read: Callable[[], Awaitable[int]], number: int) -> bool:
    return await read() == number


async def _has_at_most_one_watch(state: StateReader) -> bool:
    """True if only the encoder's own watch is left."""
    return (await state.store()).num_watches <= 1


async def _has(state: StateReader, **numbers: int) -> bool:
    stats = await state.store()
    return all(getattr(stats, name) == number for name, number in numbers.items())


async def _all(**waits: Awaitable[float]) -> dict[str, float]:
    return dict(zip(waits, await asyncio.gather(*waits.values()), strict=True))


# ---- the run -------------------------------------------------------------------------------------
async def measure(system: System, rounds: int) -> dict[str, dict[str, float]]:
    """Figures as `{stage what: {p50_ms, max_ms}}`.

    Raises:
        TimeoutError: something was not given back.
    """
    caller = Caller(system, (NUM_SLOTS + 4) * (rounds + 1))
    found: dict[str, list[float]] = {}
    async with (
        redis.Redis.from_url(inspection.redis_url(system)) as bus,
        await AsyncStoreSession.connect(system.run_dir / "store.sock", "bench/stats") as store,
    ):
        state = StateReader(system, bus, store)
        stages: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
            "queued": lambda: queued(caller, state),
            "encoding": lambda: encoding(caller, state),
            "granted": lambda: granted(caller, state, system),
            "decoding": lambda: decoding(caller, state),
        }
        try:
            await caller.send()  # the engines' first steps are slow
            for _ in range(rounds):
                for stage, run in stages.items():
                    await until(state.is_idle, "nothing is under way")
                    for what, seconds in (await run()).items():
                        found.setdefault(f"{stage}: {what}", []).append(seconds * 1e3)
            await until(state.is_idle, "nothing is left")
        finally:
            await caller.close()
            await state.close()
    return {what: {"p50_ms": statistics.median(each), "max_ms": max(each)} for what, each in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with running_system(
        TRIPTYCH_DEBUG_ENCODE_DELAY_MS=str(int(ENCODE_DELAY_S * 1e3)),
        TRIPTYCH_NUM_SLOTS=str(NUM_SLOTS),
        TRIPTYCH_BUDGET_EMBEDS=str(BUDGET_EMBEDS),
    ) as system:
        try:
            found = asyncio.run(measure(system, options.rounds))
        except TimeoutError as error:
            print(f"FAULT {error}")
            return 1
    for what, numbers in found.items():
        print(f"{what:<22} p50 {numbers['p50_ms']:7.1f} ms   max {numbers['max_ms']:7.1f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
