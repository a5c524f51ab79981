"""Child process with its own session and log, killed together with everything it started.

A service may start processes of its own (an engine has three). They stay in the child's session, which is
what is stopped: SIGTERM to the child, which ends its own processes in order; after a limit, or when it is
gone, SIGKILL to every process left in the session.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from triptych_cli.supervisor.rotating_log import LogPipe, RotatingLog
from triptych_common.runtime.liveness import Activity, activity_of

POSIX_SHARED_MEMORY = Path("/dev/shm")
KILL_ROUNDS = 50
SESSION_INTERVAL_S = 0.1
LOG_END_S = 1.0  # for the last lines; a process that has left the session may keep the log open
REST_OF_SESSION_S = 3.0  # Python's resource tracker ends after the process that it cleans up for

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _set_parent_death_signal() -> None:
    """Request SIGTERM for the death of the supervisor, in the child before exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def session_members(session: int) -> list[psutil.Process]:
    """Living processes of the session that `session` led, the leader included."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
    return members


def is_same_session(session: int, leader_started_at: float | None) -> bool:
    """False if the number belongs to another process since `leader_started_at` (Unix seconds).

    While any member lives, the kernel does not reuse the number; so a leader of another age means that
    the session is gone.
    """
    try:
        started_at = psutil.Process(session).create_time()
    except psutil.NoSuchProcess:
        return True
    return leader_started_at is not None and abs(started_at - leader_started_at) < 1.0


def shared_memory_of(members: Sequence[psutil.Process]) -> set[Path]:
    """POSIX shared memory mapped by `members`: a killed process cannot remove its own.

    By inode, because a semaphore is mapped under a temporary name and linked to its own afterwards.
    """
    inodes: set[int] = set()
    for member in members:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{member.pid}/maps").read_text().splitlines():
                # address, permissions, offset, device, inode, path
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith(f"{POSIX_SHARED_MEMORY}/"):
                    inodes.add(int(fields[4]))
    if not inodes:
        return set()
    with os.scandir(POSIX_SHARED_MEMORY) as names:
        return {Path(name.path) for name in names if name.inode() in inodes and name.is_file()}


def kill_members(session: int) -> list[psutil.Process]:
    """Kill every process in `session` and remove its shared memory; returns the killed processes."""
    members = session_members(session)
    memory = shared_memory_of(members)
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    remove(memory)
    return members


def remove(files: Iterable[Path]) -> None:
    for path in files:
        path.unlink(missing_ok=True)


def end_sessions(sessions: Sequence[int], grace_s: float) -> int:
    """End sessions that a killed supervisor has left; returns the number of killed processes.

    Blocks for little more than `grace_s`, in which the processes can end by themselves.
    """
    members = [member for session in sessions for member in session_members(session)]
    memory = shared_memory_of(members)
    for leader in [member for member in members if member.pid in sessions]:
        with contextlib.suppress(psutil.NoSuchProcess):
            leader.terminate()
    psutil.wait_procs(members, timeout=grace_s)
    num_killed = 0
    for session in sessions:
        for _ in range(KILL_ROUNDS):  # a member can have started another meanwhile
            killed = kill_members(session)
            if not killed:
                break
            num_killed += len(killed)
            psutil.wait_procs(killed, timeout=1.0)
    remove(memory)
    return num_killed


class ChildProcess:
    """A started child; `stop_session` may be called from several places and always ends."""

    def __init__(self, process: asyncio.subprocess.Process, log_pipe: LogPipe) -> None:
        self._process = process
        self._log_pipe = log_pipe
        self._memory: set[Path] = set()

    @classmethod
    async def start(
        cls, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: RotatingLog
    ) -> "ChildProcess":
        """Start a child; raises OSError if `argv[0]` cannot be executed."""
        pipe = LogPipe(log)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                env=dict(env),
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=pipe.writing,
                stderr=pipe.writing,
                start_new_session=True,
                preexec_fn=_set_parent_death_signal,
            )
        finally:
            pipe.close_writing()
        return cls(process, pipe)

    @property
    def pid(self) -> int:
        """Process id, which is also the session's."""
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def ends_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        return self._process.returncode is not None

    def activity(self) -> dict[int, Activity]:
        """Return what each process of the session has done, by its pid."""
        return {member.pid: activity_of(member.pid) for member in session_members(self.pid)}

    def record_shared_memory(self) -> None:
        """Record the session's shared memory for `stop_session`, which removes what is left of it.

        If all processes are killed at once, it cannot be found afterwards.
        """
        self._memory |= shared_memory_of(session_members(self.pid))

    async def stop_session(self, timeout_s: float) -> int:
        """End the child and its session; returns the number of killed processes.

        Shared memory is recorded while they end: an engine kills its own processes after a while, and their
        resource tracker may be killed here.
        """
        memory = self._memory
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
        else:
            timeout_s = REST_OF_SESSION_S
        limit = time.monotonic() + timeout_s
        while (members := session_members(self.pid)) and time.monotonic() < limit:
            memory |= shared_memory_of(members)
            if self._process.returncode is not None:
                await asyncio.sleep(SESSION_INTERVAL_S)  # init alone is notified of their end
            elif await self.ends_within(SESSION_INTERVAL_S):
                limit = time.monotonic() + REST_OF_SESSION_S
        num_killed = 0
        for _ in range(KILL_ROUNDS):  # a member can have started another meanwhile
            killed = kill_members(self.pid)
            num_killed += len(killed)
            await self._process.wait()
            if not killed:
                break
            await asyncio.sleep(SESSION_INTERVAL_S)
        remove(memory)
        await asyncio.to_thread(self._log_pipe.wait_end, LOG_END_S)
        return num_killed

    def kill_session(self) -> None:
        """Kill the whole session; a `stop_session` in progress ends at once."""
        kill_members(self.pid)
