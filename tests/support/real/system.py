"""Real engines for tests: the system as `./triptych up` starts it, and a monolithic vLLM beside it."""

import base64
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import psutil
import pytest
from openai import DefaultHttpxClient, OpenAI

from tests.support.process_ends import end_group
from tests.support.real.warm import client as warm
from tests.support.real.warm.preload import ENVIRONMENT
from tests.support.stores import stats_of
from tests.support.waiting import free_port, free_ports_in_a_row, wait_until
from triptych_common.protocol.store import StoreStats
from triptych_common.telemetry.span_records import SpanRecord
from triptych_common.telemetry.trace_reader import read_trace

ROOT = Path(__file__).resolve().parents[3]
DEMO_MODEL = ROOT / "models" / "digits-vl"
MODEL = Path(os.environ.get("TRIPTYCH_TEST_MODEL", DEMO_MODEL))
# Two engines that batch differently round differently in bfloat16: answers are compared in float32.
EXACT = ("--dtype", "float32")
MONOLITH_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
# An encoder tries its tower on dummy items when it starts, by default of the largest size: 20 s on one core.
_SMALL_IMAGE = {"count": 999, "width": 56, "height": 56}
SMALL_DUMMIES = {"image": _SMALL_IMAGE, "video": {**_SMALL_IMAGE, "num_frames": 4}}
# What engines need besides on this machine, and the folder in which logs and traces of systems are kept.
MORE_OPTIONS = {
    "--encoder-args=": os.environ.get("TRIPTYCH_TEST_ENCODER_ARGS", ""),
    "--prefill-decode-args=": os.environ.get("TRIPTYCH_TEST_PREFILL_DECODE_ARGS", ""),
}
KEPT_DIR = os.environ.get("TRIPTYCH_TEST_KEEP")
START_TIMEOUT_S = 600
STOP_TIMEOUT_S = 120
SPANS_TIMEOUT_S = 10


def load_strips() -> ModuleType:
    """The demo model's own generator of held-out strips, loaded by its path."""
    spec = importlib.util.spec_from_file_location("strips", ROOT / "models" / "digits-vl" / "strips.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["strips"] = module
    spec.loader.exec_module(module)
    return module


def image_part(png: bytes) -> dict[str, Any]:
    """An image as a content part of a chat message."""
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"},
    }


@dataclass(frozen=True)
class Answer:
    request_id: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class Server:
    """Any server of OpenAI's API."""

    base_url: str

    @property
    def openai(self) -> OpenAI:
        http_client = DefaultHttpxClient(trust_env=False)  # this machine alone: no proxy
        return OpenAI(
            base_url=self.base_url, api_key="none", max_retries=0, timeout=120, http_client=http_client
        )

    def ask(
        self,
        content: Any,
        *,
        stream: bool = False,
        max_tokens: int = 24,
        history: Sequence[dict[str, Any]] = (),
        api_key: str = "none",
        **extra: Any,
    ) -> Answer:
        """One user message behind `history`, at temperature 0, with the ids of the answer's tokens."""
        with self.openai.with_options(api_key=api_key) as client:
            completions: Any = client.chat.completions.with_raw_response
            raw = completions.create(
                model=MODEL.name,
                messages=[*history, {"role": "user", "content": content}],
                temperature=0,
                max_tokens=max_tokens,
                stream=stream,
                extra_body={"return_token_ids": True, **extra},
            )
            request_id = raw.headers.get("x-request-id", "")
            if not stream:
                choice = raw.parse().choices[0]
                return Answer(request_id, choice.message.content or "", list(choice.model_extra["token_ids"]))
            text = ""
            token_ids: list[int] = []
            for chunk in raw.parse():
                for choice in chunk.choices:
                    text += choice.delta.content or ""
                    token_ids += (choice.model_extra or {}).get("token_ids") or []
            return Answer(request_id, text, token_ids)


@dataclass(frozen=True)
class System(Server):
    """Triptych, as `./triptych up` left it running."""

    run_dir: Path
    state_dir: Path
    env: Mapping[str, str]

    @property
    def traces_dir(self) -> Path:
        return self.state_dir / self.run_dir.name / "traces"

    @property
    def logs_dir(self) -> Path:
        return self.state_dir / self.run_dir.name / "logs"

    def trace(
        self,
        request_id: str,
        *names: str,
        until: Callable[[list[SpanRecord]], bool] = lambda spans: True,
    ) -> list[SpanRecord]:
        """The spans of a request; waits until `names` are among theirs, and `until` is true of them.

        A process writes its spans in the order in which they end, and some time after that.
        """
        found: list[SpanRecord] = []

        def is_complete() -> bool:
            found[:] = read_trace(self.traces_dir, request_id)
            has_root = any(span.is_root for span in found)
            return has_root and set(names) <= {span.name for span in found} and until(found)

        wait_until(is_complete, SPANS_TIMEOUT_S, f"spans {names} of {request_id}")
        return found

    def store_stats(self) -> StoreStats:
        return stats_of(self.run_dir / "store.sock")

    def services(self) -> dict[str, dict[str, Any]]:
        """By name, as the supervisor knows them: `state`, `pid`, `num_restarts`, `since`, ..."""
        status = json.loads((self.run_dir / "supervisor.json").read_text())
        return {service["name"]: service for service in status["services"]}

    def service_pid(self, name: str) -> int:
        """Process of a service, as its supervisor knows it."""
        return int(self.services()[name]["pid"])

    @contextlib.contextmanager
    def stopped(self, name: str) -> Iterator[None]:
        """The service's own process hangs (SIGSTOP) until the block ends."""
        with _stopped([self.service_pid(name)]):
            yield

    @contextlib.contextmanager
    def stopped_engine(self, name: str) -> Iterator[None]:
        """The service lives, and the processes of its engine hang until the block ends."""
        children = psutil.Process(self.service_pid(name)).children(recursive=True)
        with _stopped([child.pid for child in children]):
            yield

    def instances(self) -> dict[str, dict[str, Any]]:
        """What the gateway sees in the registry, by name."""
        with self.openai as client:
            report = httpx.get(str(client.base_url.join("/health/ready")), trust_env=False).json()
        return {each["instance"]: each for each in report["instances"]}

    def command(self, *words: str, is_forked: bool = False) -> subprocess.CompletedProcess[str]:
        """A command of the launcher, on this system."""
        command = [sys.executable, "-m", "triptych_cli", *words]
        if is_forked:
            return warm.run(command, environment=self.env, timeout_s=START_TIMEOUT_S)
        return subprocess.run(
            command, env=self.env, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False
        )


@contextlib.contextmanager
def _stopped(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def running_system(
    *options: str, num_gateways: int = 1, model: Path = MODEL, is_forked: bool = False, **env: str
) -> Iterator[System]:
    """`up`, and in the end `down`. Gateways listen on the port of `base_url` and the ones after it.

    Args:
        is_forked: where nobody looks at the start: processes are forked from one that has imported vLLM, and
            encoders of the demo model try their tower on small items. Otherwise all is as a user has it.
    """
    if is_forked:
        options = _with_more(options, "--encoder-args=", shlex.join(small_dummies(model)))
    for name, more in MORE_OPTIONS.items():
        options = _with_more(options, name, more)
    shared_memory = Path(os.environ.get("TRIPTYCH_TEST_SHARED_MEMORY", "/dev/shm"))
    folder = shared_memory if shared_memory.is_dir() else None
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-t-", dir=folder))
    state_dir = Path(tempfile.mkdtemp(prefix="triptych-state-"))
    port = free_ports_in_a_row(num_gateways)
    system = System(
        base_url=f"http://127.0.0.1:{port}/v1",
        run_dir=run_dir,
        state_dir=state_dir,
        env={**os.environ, "TRIPTYCH_RUN_DIR": str(run_dir), "TRIPTYCH_STATE_DIR": str(state_dir), **env},
    )
    try:
        up = system.command(
            "up", f"--model={model}", f"--port={port}", f"--gateways={num_gateways}", *options,
            is_forked=is_forked,
        )  # fmt: skip
        assert up.returncode == 0, f"up failed:\n{up.stdout}\n{up.stderr}"
        yield system
    finally:
        down = system.command("down", is_forked=is_forked)
        left = [path for path in run_dir.rglob("*") if path.is_socket() or path.name.startswith("region")]
        if KEPT_DIR is not None:
            shutil.copytree(state_dir, Path(KEPT_DIR) / state_dir.name, dirs_exist_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(state_dir, ignore_errors=True)
        assert down.returncode == 0, f"down failed:\n{down.stdout}\n{down.stderr}"
        assert not left, f"down left {left}"


def small_dummies(model: Path) -> list[str]:
    """Options of an engine that has a tower, for the demo model's."""
    return [f"--limit-mm-per-prompt={json.dumps(SMALL_DUMMIES)}"] if model == DEMO_MODEL else []


def _with_more(options: Sequence[str], name: str, more: str) -> tuple[str, ...]:
    """`options` with `more` in front of what the option `name` gives."""
    if not more:
        return tuple(options)
    (given,) = [each.removeprefix(name) for each in options if each.startswith(name)] or [""]
    others = (each for each in options if not each.startswith(name))
    return (*others, f"{name}{more} {given}".strip())


@contextlib.contextmanager
def running_monolith(
    folder: Path, *options: str, model: Path = MODEL, is_forked: bool = False
) -> Iterator[Server]:
    """vLLM as it comes: the same weights, everything in one engine. `options`: more of vLLM's own.

    `is_forked`: as a system's.
    """
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}",
        f"--served-model-name={model.name}", f"--port={port}", "--host=127.0.0.1", "--enforce-eager",
        *EXACT, *options,
    ]  # fmt: skip
    log = folder / "monolith.log"
    with started_server(command, MONOLITH_ENVIRONMENT, port, log, is_forked=is_forked) as server:
        server.wait_until_up()
        yield server


@dataclass(frozen=True)
class StartedServer(Server):
    """A server in a process of its own, which may not answer yet."""

    process: "warm.ForkedProcess | subprocess.Popen[bytes]"
    log: Path

    def wait_until_up(self) -> None:
        port = int(self.base_url.rpartition(":")[2].partition("/")[0])
        wait_until(
            lambda: _answers(port, self.process, self.log), START_TIMEOUT_S, f"{self.log.stem} answers"
        )


@contextlib.contextmanager
def started_server(
    command: Sequence[str], env: Mapping[str, str], port: int, log: Path, *, is_forked: bool = False
) -> Iterator[StartedServer]:
    """The process group of `command`; the test's own environment wins over `env`."""
    with log.open("wb") as output:
        process = warm.start(command, environment={**env, **os.environ}, output=output, is_forked=is_forked)
        try:
            yield StartedServer(f"http://127.0.0.1:{port}/v1", process, log)
        finally:
            end_group(process)


def _answers(port: int, process: "warm.ForkedProcess | subprocess.Popen[bytes]", log: Path) -> bool:
    if process.poll() is not None:
        pytest.fail(f"{log.stem} ended:\n{log.read_text(errors='replace')[-3000:]}")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
