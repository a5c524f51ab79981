"""Starts and ends an arm: one vLLM engine, two behind the serial proxy, or `./triptych up`."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from comparison.arms import Arm, Kind
from comparison.cores import CorePlan, hold_to

BENCHMARKS = Path(__file__).resolve().parents[1]
sys.path.append(str(BENCHMARKS.parent))  # for tests.support

from tests.support.process_ends import end_group  # noqa: E402

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 120.0
LOOK_EVERY_S = 0.2
LOG_TAIL_BYTES = 3000
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker in EngineCore's process: less for each step
}
ON_OWN_CORES = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Environment for engines with a part of the cores, as Triptych sets it: idle threads must not spin."""


class StartError(Exception):
    """An arm did not start; the text has the end of its log."""


@dataclass(frozen=True)
class EngineOptions:
    """Options that are the same for every engine of every arm."""

    model: Path
    arguments: tuple[str, ...]  # of vLLM
    on_gpu: bool = False


@dataclass(frozen=True)
class RunningSystem:
    """Running arm that answers requests."""

    arm: Arm
    base_url: str
    model: str  # the name to ask for
    services: Mapping[str, int]  # pid of each service's root process
    outside_vllm: frozenset[str] = frozenset()  # names of services that are no engines
    traces_dir: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)  # as it was started


@contextlib.contextmanager
def running(arm: Arm, options: EngineOptions, cores: CorePlan) -> Iterator[RunningSystem]:
    """Run an arm during the block.

    Raises:
        StartError: it did not start.
    """
    starts = {Kind.MONOLITH: _monolith, Kind.SERIAL: _serial, Kind.TRIPTYCH: _triptych}
    with starts[arm.kind](arm, options, cores) as system:
        yield system


@contextlib.contextmanager
def _monolith(arm: Arm, options: EngineOptions, cores: CorePlan) -> Iterator[RunningSystem]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-")))
        port = free_port()
        server = stack.enter_context(_vllm(options, (), port, cores.everything, folder / "monolith.log", {}))
        _wait_until_healthy(server, port, folder / "monolith.log")
        yield RunningSystem(arm, f"http://127.0.0.1:{port}/v1", options.model.name, {"monolith": server.pid})


@contextlib.contextmanager
def _serial(arm: Arm, options: EngineOptions, cores: CorePlan) -> Iterator[RunningSystem]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triptych-bench-")))
        shared = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="triptych-bench-", dir=_shared_memory())
        )
        encoder_port, port, proxy_port = free_port(), free_port(), free_port()
        encoder_log, log, proxy_log = (folder / f"{name}.log" for name in ("encoder", "prefill", "proxy"))
        encoder = stack.enter_context(
            _vllm(
                options, ("--mm-encoder-only", _transfer("ec_producer", shared)), encoder_port,
                cores.encoder, encoder_log, ON_OWN_CORES,
            )
        )  # fmt: skip
        limits = json.dumps({"image": 0, "video": 0})
        consumer = ("--enable-mm-embeds", f"--limit-mm-per-prompt={limits}", _transfer("ec_consumer", shared))
        prefill_decode = stack.enter_context(
            _vllm(options, consumer, port, cores.prefill_decode, log, ON_OWN_CORES)
        )
        _wait_until_healthy(encoder, encoder_port, encoder_log)
        _wait_until_healthy(prefill_decode, port, log)
        proxy = stack.enter_context(
            _process(
                [
                    sys.executable, "-m", "comparison.serial_proxy", f"--port={proxy_port}",
                    f"--encoder=http://127.0.0.1:{encoder_port}/v1",
                    f"--prefill-decode=http://127.0.0.1:{port}/v1",
                ],
                {}, cores.everything, proxy_log,
            )
        )  # fmt: skip
        _wait_until_healthy(proxy, proxy_port, proxy_log)
        yield RunningSystem(
            arm,
            f"http://127.0.0.1:{proxy_port}/v1",
            options.model.name,
            {"encoder": encoder.pid, "prefill_decode": prefill_decode.pid, "proxy": proxy.pid},
            frozenset({"proxy"}),
        )


@contextlib.contextmanager
def _triptych(arm: Arm, options: EngineOptions, cores: CorePlan) -> Iterator[RunningSystem]:
    port = free_port()
    with (
        tempfile.TemporaryDirectory(dir=_shared_memory(), prefix="triptych-bench-") as run_dir,
        tempfile.TemporaryDirectory(prefix="triptych-bench-") as state,
    ):
        env = {**os.environ, "TRIPTYCH_RUN_DIR": run_dir, "TRIPTYCH_STATE_DIR": state, **arm.env}
        for variable in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
            env.pop(variable, None)  # set, they keep engines from sharing cores
        if arm.is_pinned:
            env["OMP_NUM_THREADS"] = str(len(cores.encoder))
        cli = [sys.executable, "-m", "triptych_cli"]
        words = ["up", f"--model={options.model}", f"--port={port}", f"--encoders={arm.num_encoders}"]
        words += [f"--{role}-args={' '.join(options.arguments)}" for role in ("encoder", "prefill-decode")]
        try:
            if _knows_core_policy(cli):
                words.append(f"--core-policy={arm.env['TRIPTYCH_CORE_POLICY']}")
            done = subprocess.run(
                [*cli, *words], env=env, check=False, timeout=START_TIMEOUT_S, capture_output=True, text=True
            )
            if done.returncode != 0:
                raise StartError(f"{arm.name} did not start:\n{done.stdout}\n{done.stderr}")
            status = json.loads((Path(run_dir) / "supervisor.json").read_text())
            services = {service["name"]: int(service["pid"]) for service in status["services"]}
            if arm.is_pinned:
                _pin(services, cores, arm.num_encoders)
            engines = {name for name in services if name.startswith(("encoder", "prefill_decode"))}
            yield RunningSystem(
                arm,
                f"http://127.0.0.1:{port}/v1",
                options.model.name,
                services,
                frozenset(services) - engines,
                Path(state) / Path(run_dir).name / "traces",
                arm.env,
            )
        finally:
            subprocess.run(
                [*cli, "down"], env=env, check=False, timeout=STOP_TIMEOUT_S, stdout=subprocess.DEVNULL
            )


def _pin(services: Mapping[str, int], cores: CorePlan, num_encoders: int) -> None:
    encoders = iter(cores.encoders(num_encoders))
    for name, pid in sorted(services.items()):
        if name.startswith("encoder"):
            hold_to(pid, next(encoders))
        elif name.startswith("prefill_decode"):
            hold_to(pid, cores.prefill_decode)


def _knows_core_policy(cli: Sequence[str]) -> bool:
    """True if this `up` has `--core-policy`; without it its engines run one unpinned thread each."""
    wide = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(
        [*cli, "up", "--help"], env=wide, check=True, timeout=60, capture_output=True, text=True
    )
    return "--core-policy" in shown.stdout


# ---- processes ---------------------------------------------------------------------------------------
def _transfer(role: str, folder: str) -> str:
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": {"shared_storage_path": folder},
    }
    return "--ec-transfer-config=" + json.dumps(config)


def _vllm(
    options: EngineOptions,
    arguments: Sequence[str],
    port: int,
    cores: Sequence[int],
    log: Path,
    env: Mapping[str, str],
) -> contextlib.AbstractContextManager["subprocess.Popen[bytes]"]:
    """Run vLLM's own server, with a thread for each of its cores."""
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={options.model}",
        f"--served-model-name={options.model.name}", "--host=127.0.0.1", f"--port={port}",
        *([] if options.on_gpu else ["--enforce-eager"]), *options.arguments, *arguments,
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(len(cores))}
    return _process(command, {**ENGINE_ENV, **threads, **env}, cores, log)


@contextlib.contextmanager
def _process(
    command: Sequence[str], env: Mapping[str, str], cores: Sequence[int], log: Path
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a process and its descendants on `cores`; it ends, with its group, with the block."""
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            pinned, env={**os.environ, **env}, cwd=BENCHMARKS, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            end_group(process)


def _wait_until_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            tail = log.read_text(errors="replace")[-LOG_TAIL_BYTES:]
            raise StartError(f"{log.stem} did not start:\n{tail}")
        time.sleep(LOOK_EVERY_S)


def _shared_memory() -> Path | None:
    """Folder on a tmpfs; None to use the temporary directory."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
