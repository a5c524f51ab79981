"""A hostile value in each field of each endpoint stops the gateway's event loop for 250 ms of CPU at most.

CPU time of the loop's thread between two of its timers: the machine's load is no part of it.
"""

import random
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from tests.support.gateway.fake_prefill_decode import FakePrefillDecode
from tests.support.gateway.process import environment, process_of
from tests.support.gateway.samples import MODEL
from tests.support.hostile.fields import HostileRequests, targets
from tests.support.hostile.fuzzing import fuzz
from tests.support.hostile.loop_probe import probe_environment, read_stops
from tests.support.waiting import free_port, until, until_async
from triptych_common.bus import AsyncBus

MAX_STOP_S = 0.25
MAX_GROWTH_BYTES = 512 << 20


class RepeatingInstance(FakePrefillDecode):
    """Refuses every request as vLLM does, with much of the body in the error's text."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST"])
        async def refuse(request: Request) -> Response:
            text = (await request.body())[-400_000:].decode(errors="replace")
            error = {"message": f"1 validation error: {{'input': {text}}}", "type": "BadRequestError"}
            return JSONResponse({"error": {**error, "param": None, "code": 400}}, 400)

        return app


@pytest.mark.slow
async def test_no_field_stops_the_event_loop(
    redis_url: str,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    wanted = pytestconfig.getoption("--hypothesis-seed", default=None) or "1"  # random ones: the benchmark's
    seed = random.SystemRandom().getrandbits(32) if wanted == "random" else int(wanted)
    print(f"--hypothesis-seed={seed}")
    record_property("hypothesis_seed", seed)
    made, places = HostileRequests(seed, MODEL), targets()
    one_of_each_field = {each.field: each for each in made.shuffled(places)}.values()
    port, probed = free_port(), tmp_path / "probed"
    probed.mkdir()
    env = environment(redis_url, tmp_path, port) | probe_environment(probed)
    env |= {
        "TRIPTYCH_BODY_TIMEOUT_S": "5",
        "TRIPTYCH_CONNECT_TIMEOUT_S": "60",
        "TRIPTYCH_FETCH_ALLOWED_HOSTS": '["nowhere.invalid"]',
    }
    base_url = f"http://127.0.0.1:{port}"
    async with (
        await AsyncBus.connect(redis_url, "default", client_name="test") as bus,
        RepeatingInstance().running(bus),
        process_of(env) as process,
    ):
        async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client:

            async def is_ready() -> bool:
                try:
                    return (await client.get("/v1/models")).json()["data"] != []
                except httpx.HTTPError:
                    return False

            await until_async(is_ready)
        gateway = psutil.Process(process.pid)
        before = gateway.memory_info().rss
        outcome = await fuzz(base_url, (made.request(each) for each in one_of_each_field), seed=seed)
        await until(lambda: bool(read_stops(probed)))
        (stops,) = (each for each in read_stops(probed) if each.pid == process.pid)
        growth = gateway.memory_info().rss - before
    print(f"longest stop {stops.longest_cpu_s:.3f} s of CPU, {growth >> 20} MiB more, {outcome.statuses}")
    assert not outcome.faults, "\n".join(outcome.faults[:20])
    assert outcome.fields == {each.field for each in places}
    told = [f"{each}\n" + "\n".join(outcome.at(each["at"], each["wall_s"])[:8]) for each in stops.stops]
    assert stops.longest_cpu_s <= MAX_STOP_S, "\n".join(told)
    assert growth <= MAX_GROWTH_BYTES
