"""Processes and shared memory of a run of pytest end with it, however it ends; and so does a run that hangs.

    pytest ──PYTEST_OWNER──▶ all that it starts
      ▲ │ a byte for each report
      │ ▼
    janitor: ends every process with that variable, removes temporary folders and shared memory

A test that hangs fails by its own limit (`timeout` in pyproject.toml), which shows where. The janitor's limit
is for the rest: a collection, a worker, pytest's own end.

The run's file of notes names its temporary folders. It is removed last: a run whose janitor was ended, too,
is swept by the next one. A redis-server overwrites its environment: it is known by its folder. The janitor is
a process of this file, so that nothing but the standard library is imported.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

OWNER = "PYTEST_OWNER"
"""`PID-START`, the id and start time of the first pytest process; xdist's workers have their controller's."""
_NOTES = "pytest-owner-"
_SHARED_MEMORY = re.compile(rb"/dev/shm/[^/\n ]+")
_END_LIMIT_S = 60.0
STILL_LIMIT_S = 660.0  # longer than a test's own limit
_INTERRUPT_LIMIT_S = 120.0
_MOVED, _IN_DEBUGGER = b"m", b"d"


class Janitor:
    """Plugin of the process that sees all reports: passes on that something has moved."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_itemcollected(self) -> None:
        self._send(_MOVED)

    def pytest_runtest_logreport(self) -> None:
        self._send(_MOVED)

    def pytest_enter_pdb(self) -> None:
        self._send(_IN_DEBUGGER)

    def _send(self, byte: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, byte)


def try_start(still_limit_s: float = STILL_LIMIT_S) -> Janitor | None:
    """Start the janitor of this run and sweep earlier runs. None in a worker: its controller has one."""
    if _is_alive(os.environ.get(OWNER, "")):
        _note_folders(os.environ[OWNER])
        return None
    for notes in Path(tempfile.gettempdir()).glob(f"{_NOTES}*"):
        owner = notes.name.removeprefix(_NOTES)
        if not _is_alive(owner):
            end(owner)
    owner = f"{os.getpid()}-{_start_time(os.getpid())}"
    notes_of(owner).touch()
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-S", __file__, owner, str(still_limit_s)],
        env={name: value for name, value in os.environ.items() if name != OWNER},
        stdin=reading,
        start_new_session=True,
    )
    process.returncode = 0  # it outlives this process: nothing waits for it
    os.close(reading)
    os.environ[OWNER] = owner
    os.environ["SPT_NOENV"] = "1"  # setproctitle, of xdist and vLLM, leaves /proc/PID/environ as it is
    _note_folders(owner)
    return Janitor(writing)


def processes_of(owner: str) -> Iterator[int]:
    """Processes that were started by the run, forked from those, or are children of those."""
    wanted, folders = f"{OWNER}={owner}".encode(), _noted(owner)
    children: dict[int, list[int]] = {}
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        children.setdefault(_parent(pid), []).append(pid)
        if wanted in _read(pid, "environ").split(b"\0") or _folder(pid) in folders:
            found.append(pid)
    seen = {os.getpid()}
    while found:
        if (pid := found.pop()) not in seen:
            seen.add(pid)
            found += children.get(pid, [])
            yield pid


def end(owner: str) -> None:
    """End the processes of a run and remove its shared memory."""
    paths = _noted(owner)
    deadline = time.monotonic() + _END_LIMIT_S
    while (pids := list(processes_of(owner))) and time.monotonic() < deadline:
        for pid in pids:
            paths |= set(map(os.fsdecode, _SHARED_MEMORY.findall(_read(pid, "maps"))))
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for path in map(Path, paths):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    notes_of(owner).unlink(missing_ok=True)


def notes_of(owner: str) -> Path:
    """Return the run's file of notes, which exists until nothing of the run is left."""
    return Path(tempfile.gettempdir()) / f"{_NOTES}{owner}"


def _note_folders(owner: str) -> None:
    """Write down each temporary folder that this process makes."""
    notes = os.open(notes_of(owner), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "tempfile.mkdtemp":
            os.write(notes, f"{arguments[0]}\n".encode())

    sys.addaudithook(note)


def _noted(owner: str) -> set[str]:
    try:
        return set(notes_of(owner).read_text().splitlines())
    except OSError:
        return set()


def _folder(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _stat(pid: int) -> list[bytes]:
    """The kernel's fields behind the process's name; none for one that has ended."""
    return _read(pid, "stat").rpartition(b")")[2].split()


def _parent(pid: int) -> int:
    """0 for a process that has ended."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _start_time(pid: int) -> str:
    """In the kernel's ticks; empty for a process that has ended."""
    fields = _stat(pid)
    return "" if not fields or fields[0] in (b"Z", b"X") else fields[19].decode()


def _is_alive(owner: str) -> bool:
    pid, _, start = owner.partition("-")
    return pid.isdigit() and bool(start) and _start_time(int(pid)) == start


def main(owner: str, still_limit_s: float) -> None:
    try:
        watched = os.pidfd_open(int(owner.partition("-")[0]))
    except ProcessLookupError:
        watched = None
    if watched is not None and _is_alive(owner):
        _wait_for_end(watched, still_limit_s)
    end(owner)


def _wait_for_end(watched: int, still_limit_s: float) -> None:
    """Return when the process has ended. One that hangs is interrupted."""
    limit_s: float | None = still_limit_s
    while True:
        ready = select.select([watched, 0], [], [], limit_s)[0]
        if watched in ready:
            return
        if not ready:
            break
        if _IN_DEBUGGER in os.read(0, 65536):
            limit_s = None
    print(f"\nno test has ended for {still_limit_s:g} s: the run ends", file=sys.stderr, flush=True)
    signal.pidfd_send_signal(watched, signal.SIGINT)
    if not select.select([watched], [], [], _INTERRUPT_LIMIT_S)[0]:
        signal.pidfd_send_signal(watched, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
