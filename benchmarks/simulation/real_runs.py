"""Runs of a real system that the model is fitted to and checked against: `./triptych up` with the demo model.

Each workload is sent for a few seconds, in turns, to one system: encoder on one half of the cores,
prefill_decode on the other, as `compare` does. Times to the first token are taken at the client.
"""

import asyncio
import base64
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from comparison.cores import hold_to, plan_cores
from comparison.systems import free_port
from load.contents import Part, new_image

from simulation.workload import Arrivals, RequestKind, Workload

START_LIMIT_S, END_LIMIT_S, REQUEST_LIMIT_S = 300, 120, 120
EXPORT_WAIT_S = 1.0  # spans reach the files this much later at the latest
STAMP_BYTES = 16
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "zero")


@dataclass(frozen=True)
class Measured:
    """One request at the client. Seconds; `started_s` and `ended_s` since the start of the workload."""

    kind: str
    started_s: float
    ttft_s: float
    ended_s: float
    num_tokens: int
    request_id: str


@dataclass
class RealRun:
    """Results of a real system for each workload."""

    num_cores: int
    seconds_each: float  # of a workload in one round
    traces: str = ""  # the folder of its traces
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    num_rounds: int = 1
    load_average: float = 0.0  # of the machine at the end

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "RealRun":
        raw = json.loads(path.read_text())
        measured = {name: [Measured(**each) for each in rows] for name, rows in raw["measured"].items()}
        return cls(**(raw | {"measured": measured}))


@contextmanager
def real_system(model: Path, state_dir: Path, *options: str) -> Iterator[tuple[str, Path]]:
    """Its URL, and the folder of its traces, which stays."""
    port, cores = free_port(), plan_cores()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="triptych-sim-") as run_dir:
        env = {**os.environ, "TRIPTYCH_RUN_DIR": run_dir, "TRIPTYCH_STATE_DIR": str(state_dir)}
        env["OMP_NUM_THREADS"] = str(len(cores.encoder))
        cli = [sys.executable, "-m", "triptych_cli"]
        try:
            subprocess.run(
                [*cli, "up", f"--model={model}", f"--port={port}", "--core-policy=split", *options],
                env=env, check=True, timeout=START_LIMIT_S, stdout=sys.stderr,
            )  # fmt: skip
            for service in json.loads((Path(run_dir) / "supervisor.json").read_text())["services"]:
                if service["name"].startswith("encoder"):
                    hold_to(service["pid"], cores.encoder)
                elif service["name"].startswith("prefill_decode"):
                    hold_to(service["pid"], cores.prefill_decode)
            yield f"http://127.0.0.1:{port}", state_dir / Path(run_dir).name / "traces"
        finally:
            subprocess.run([*cli, "down"], env=env, check=False, timeout=END_LIMIT_S, stdout=sys.stderr)


async def run_workloads(
    url: str, model: str, workloads: dict[str, Workload], run: RealRun, path: Path, *, seed: int, rounds: int
) -> None:
    """Each workload in turn, `rounds` times, after one request of each kind; kept in `path` each round."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_LIMIT_S, trust_env=False) as client:
        sender = Sender(client, model, rng)
        for kind in {kind for workload in workloads.values() for kind in workload.kinds}:
            await sender.send(kind, 0.0)
        for number in range(rounds):
            for name, workload in workloads.items():
                rows = await sender.play(workload)
                run.measured.setdefault(name, []).extend(rows)
                print(f"{name}: {len(rows)} requests", file=sys.stderr)
            run.num_rounds, run.load_average = number + 1, os.getloadavg()[0]
            run.save(path)
        await asyncio.sleep(EXPORT_WAIT_S)


class Sender:
    """Sends requests of a workload as its arrivals say.

    An image is made once for each size; bytes behind its end make it new to every cache, at no cost to the
    machine that is measured.
    """

    def __init__(self, client: httpx.AsyncClient, model: str, rng: random.Random) -> None:
        self._client, self._model, self._rng = client, model, rng
        self._images: dict[int, bytes] = {}  # by side

    def _new_image(self, side: int) -> str:
        if side not in self._images:
            self._images[side] = _file_of(new_image(self._rng, side))
        stamped = self._images[side] + self._rng.randbytes(STAMP_BYTES)
        return "data:image/png;base64," + base64.b64encode(stamped).decode()

    async def play(self, workload: Workload) -> list[Measured]:
        """All requests that start before the workload's end."""
        rows: list[Measured] = []
        start = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for stream in workload.streams:
                if stream.arrivals is Arrivals.CLOSED:
                    for _ in range(stream.num_clients):
                        group.create_task(self._closed(stream.kind, start, workload.seconds, rows))
                else:
                    group.create_task(self._open(stream.kind, stream.rate, start, workload.seconds, rows))
        return rows

    async def _closed(self, kind: RequestKind, start: float, seconds: float, rows: list[Measured]) -> None:
        while time.monotonic() - start < seconds:
            rows.append(await self.send(kind, start))

    async def _open(
        self, kind: RequestKind, rate: float, start: float, seconds: float, rows: list[Measured]
    ) -> None:
        async def one() -> None:
            rows.append(await self.send(kind, start))

        async with asyncio.TaskGroup() as group:
            for number in range(int(seconds * rate)):
                await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
                group.create_task(one())

    async def send(self, kind: RequestKind, start: float) -> Measured:
        """One request with new images. Its body is made before the clock starts.

        Raises:
            httpx.HTTPError: it failed.
        """
        images = [self._new_image(kind.image_side) for _ in range(kind.num_images)]
        text = " ".join(self._rng.choice(WORDS) for _ in range(kind.num_text_words))
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        content.append({"type": "text", "text": text})
        body = json.dumps({
            "model": self._model, "messages": [{"role": "user", "content": content}], "stream": True,
            "max_tokens": kind.num_output_tokens, "temperature": 0.0, "ignore_eos": True,
        }).encode()  # fmt: skip
        headers = {"content-type": "application/json"}
        sent, first, num_tokens = time.monotonic(), 0.0, 0
        async with self._client.stream(
            "POST", "/v1/chat/completions", content=body, headers=headers
        ) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and '"content":"' in line and '"content":""' not in line:
                    first = first or time.monotonic()
                    num_tokens += 1
            request_id = answer.headers["x-request-id"]
        now = time.monotonic()
        return Measured(kind.name, sent - start, (first or now) - sent, now - start, num_tokens, request_id)


def _file_of(image: Part) -> bytes:
    return base64.b64decode(image["image_url"]["url"].partition(",")[2])
