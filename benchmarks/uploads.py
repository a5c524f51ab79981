"""Cost of uploads at the gateway, and of large media on the way to an encoder.

    python benchmarks/uploads.py [--rounds 7] [--other LABEL=CHECKOUT ...] [--json FILE]

Real gateways, all up at once: one of this checkout, and one of each checkout named by `--other`, each on one
core, with a real Redis. Encoder and prefill_decode are fakes in this process, on the other core. Gateways
take turns, request by request. Every image is new: a small picture, and random bytes behind it.

    CPU ms per image     a request with one small picture, less one with text alone
    CPU ms per MiB       what a request with a large image takes more than one with a small one, by its MiB:
                         body, checks, hash, the way to the encoder. In base64 in the request, or by URL
    the encoder's fetch  one item asked for again and again by the encoder's own client: time and CPU per MiB,
                         alone, and eight at once, as many as an encoder has jobs in hand
    longest step         CPU time of this checkout's splitter for 64 KiB of a body of 20 MiB: others wait
                         so long

CPU is the scheduler's count of all threads of the gateway. A figure is the median of its rounds.
"""

import argparse
import asyncio
import base64
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gateway_bench.arms import GATEWAY, Arm, cores, process, source_path, until_ready  # noqa: E402

from tests.conftest import embedded_redis  # noqa: E402
from tests.support.gateway.fake_encoder import FakeEncoder  # noqa: E402
from tests.support.gateway.fake_prefill_decode import FakePrefillDecode  # noqa: E402
from tests.support.gateway.media_server import SERVED, MediaServer, answering  # noqa: E402
from tests.support.gateway.samples import MODEL, image_bytes  # noqa: E402
from triptych_cli.system.machine import free_ports  # noqa: E402
from triptych_common.bus import AsyncBus  # noqa: E402
from triptych_common.protocol.codec import Envelope  # noqa: E402
from triptych_encoder.jobs.media_source import MediaSource, new_media_client  # noqa: E402
from triptych_gateway.__main__ import map_large_blocks  # noqa: E402
from triptych_gateway.request.body_splitter import BodySplitter  # noqa: E402
from triptych_gateway.request.request_body import STEP  # noqa: E402

MIB = 1 << 20
LARGE_MIB = 16
SMALL_PER_ROUND, LARGE_PER_ROUND, FETCHES_PER_ROUND = 20, 4, 8
AT_ONCE = 8
Figures = dict[str, dict[str, list[float]]]  # of each arm, by name


def _new_image(num_bytes: int) -> bytes:
    picture = image_bytes()
    return picture + os.urandom(max(num_bytes - len(picture), 16))


def _body(content: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode()


def _with_image(url: str) -> bytes:
    return _body([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}])


class Uploads:
    """The fakes, and a client that asks one gateway after the other."""

    def __init__(
        self, arms: list[Arm], encoder: FakeEncoder, server: MediaServer, http: httpx.AsyncClient
    ) -> None:
        self._arms, self._encoder, self._server, self._http = arms, encoder, server, http
        self._num_images = 0
        self.figures: Figures = {arm.name: defaultdict(list) for arm in arms}

    async def ask(self, arm: Arm, body: bytes) -> None:
        answer = await self._http.post(f"{arm.url}/v1/chat/completions", content=body)
        if answer.status_code != 200:
            raise RuntimeError(f"{arm.name}: {answer.status_code} {answer.text[:200]}")
        self._encoder.media.clear()

    def base64_body(self, num_bytes: int) -> bytes:
        return _with_image("data:image/png;base64," + base64.b64encode(_new_image(num_bytes)).decode())

    def url_body(self, num_bytes: int) -> bytes:
        self._num_images += 1
        path = f"/{self._num_images}"
        self._server.answers = {path: answering(200, _new_image(num_bytes))}
        return _with_image(self._server.url(path))

    async def cpu_ms(self, name: str, num: int, body: Callable[[], bytes]) -> None:
        """Measure the CPU milliseconds of a request at each arm, in turns."""
        used = dict.fromkeys((arm.name for arm in self._arms), 0.0)
        for _ in range(num):
            for arm in self._arms:
                raw = body()
                before = arm.cpu_s()
                await self.ask(arm, raw)
                used[arm.name] += arm.cpu_s() - before
        for arm in self._arms:
            self.figures[arm.name][name].append(used[arm.name] / num * 1e3)

    async def fetches(self) -> None:
        """Have the encoder's client fetch an item while its request waits."""
        for arm in self._arms:
            self._encoder.before_metadata.clear()
            num_jobs = len(self._encoder.jobs)
            async with asyncio.TaskGroup() as group, new_media_client() as client:
                group.create_task(self.ask(arm, self.base64_body(LARGE_MIB * MIB)))
                while len(self._encoder.jobs) == num_jobs:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                source = MediaSource(client, LARGE_MIB * 2 * MIB)
                fetch = partial(source.fetch, self._encoder.jobs[-1], Envelope(self._encoder.jobs[-1]))
                await self._fetch(arm, "alone", 1, FETCHES_PER_ROUND, fetch)
                await self._fetch(arm, f"{AT_ONCE} at once", AT_ONCE, 1, fetch)
                self._encoder.before_metadata.set()

    async def _fetch(
        self, arm: Arm, name: str, num_items: int, repeats: int, fetch: Callable[[], Awaitable[bytes]]
    ) -> None:
        cpu, own, began = arm.cpu_s(), time.process_time(), time.perf_counter()
        for _ in range(repeats):
            await asyncio.gather(*(fetch() for _ in range(num_items)))
        num_mib = repeats * num_items * LARGE_MIB
        figures = self.figures[arm.name]
        figures[f"fetch {name}: ms per MiB"].append((time.perf_counter() - began) * 1e3 / num_mib)
        figures[f"fetch {name}: gateway's CPU ms per MiB"].append((arm.cpu_s() - cpu) * 1e3 / num_mib)
        figures[f"fetch {name}: client's CPU ms per MiB"].append((time.process_time() - own) * 1e3 / num_mib)

    async def run_round(self) -> None:
        text = _body("what is it?")
        await self.cpu_ms("text: CPU ms", SMALL_PER_ROUND, lambda: text)
        for way, body in (("base64", self.base64_body), ("url", self.url_body)):
            await self.cpu_ms(f"{way}, small: CPU ms", SMALL_PER_ROUND, partial(body, 0))
            await self.cpu_ms(
                f"{way}, {LARGE_MIB} MiB: CPU ms", LARGE_PER_ROUND, partial(body, LARGE_MIB * MIB)
            )
        await self.fetches()
        for figures in self.figures.values():
            small, large = figures["base64, small: CPU ms"][-1], f"{LARGE_MIB} MiB: CPU ms"
            figures["base64: CPU ms per image"].append(small - figures["text: CPU ms"][-1])
            figures["base64: CPU ms per MiB"].append((figures[f"base64, {large}"][-1] - small) / LARGE_MIB)
            small = figures["url, small: CPU ms"][-1]
            figures["url: CPU ms per image"].append(small - figures["text: CPU ms"][-1])
            figures["url: CPU ms per MiB"].append((figures[f"url, {large}"][-1] - small) / LARGE_MIB)


@asynccontextmanager
async def running(others: dict[str, Path]) -> AsyncIterator[Uploads]:
    """Gateways as processes, the rest here."""
    arm_core, own_core = cores()
    os.sched_setaffinity(0, {own_core})
    sources = {GATEWAY: ROOT, **others}
    server = MediaServer()
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="uploads-") as folder:
        redis_url = held.enter_context(embedded_redis()).url
        async with AsyncExitStack() as services:
            bus = await services.enter_async_context(
                await AsyncBus.connect(redis_url, "default", client_name="benchmark")
            )
            encoder = await services.enter_async_context(FakeEncoder(bus).running())
            await services.enter_async_context(FakePrefillDecode().running(bus))
            await services.enter_async_context(server.running())
            http = await services.enter_async_context(httpx.AsyncClient(trust_env=False, timeout=60))
            arms = []
            for index, (name, checkout) in enumerate(sources.items()):
                run_dir, (port,) = Path(folder) / f"run-{index}", free_ports(1)
                run_dir.mkdir(mode=0o700)
                environment = {
                    "PYTHONPATH": source_path(checkout),
                    "TRIPTYCH_REDIS_URL": redis_url,
                    "TRIPTYCH_RUN_DIR": str(run_dir),
                    "TRIPTYCH_PORT": str(port),
                    "TRIPTYCH_INSTANCE": f"gateway-{index}",
                    "TRIPTYCH_LOG_LEVEL": "warning",
                    "TRIPTYCH_FETCH_ALLOWED_NETWORKS": json.dumps([f"{SERVED}/32"]),
                    "TRIPTYCH_FETCH_ALLOWED_PORTS": json.dumps([server.port]),
                }
                gateway = held.enter_context(process(["-m", "triptych_gateway"], arm_core, environment))
                arms.append(Arm(name, f"http://127.0.0.1:{port}", gateway.pid))
                await until_ready(f"http://127.0.0.1:{port}/health/ready", gateway)
            yield Uploads(arms, encoder, server, http)


def longest_step_ms() -> float:
    """CPU time of the longest step in which a body of 20 MiB is split."""
    raw = _with_image("data:image/png;base64," + base64.b64encode(_new_image(20 * MIB)).decode())
    splitter, longest = BodySplitter(), 0.0
    for at in range(0, len(raw), STEP):
        piece = raw[at : at + STEP]
        began = time.thread_time()
        splitter.feed(piece)
        longest = max(longest, time.thread_time() - began)
    return longest * 1e3


def print_figures(figures: Figures) -> None:
    arms = list(figures)
    print(f"{'':46}" + "".join(f"{arm:>16}" for arm in arms))
    for name in figures[arms[0]]:
        print(f"{name:46}" + "".join(f"{statistics.median(figures[arm][name]):16.2f}" for arm in arms))


def _other(text: str) -> tuple[str, Path]:
    label, _, checkout = text.partition("=")
    return label, Path(checkout)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--other", type=_other, action="append", default=[], help="LABEL=CHECKOUT")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    async def measure() -> Figures:
        async with running(dict(options.other)) as uploads:
            await uploads.run_round()  # warm-up
            for figures in uploads.figures.values():
                figures.clear()
            for _ in range(options.rounds):
                await uploads.run_round()
            return uploads.figures

    with suppress(KeyboardInterrupt):
        figures = asyncio.run(measure())
        print_figures(figures)
        map_large_blocks()  # as gateways do
        steps = [longest_step_ms() for _ in range(options.rounds)]
        print(f"{'longest step of the splitter: CPU ms':46}{statistics.median(steps):16.2f}")
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
