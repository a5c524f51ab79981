"""A network namespace of its own, held by a thread: whatever that thread starts or opens is inside.

It has no name in the file system and belongs to this process: when the process ends, in whichever way, its
namespaces and their interfaces are gone.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

CLONE_NEWNET = 0x40000000


def enter_namespace(path: str) -> None:
    """The calling thread, and what it starts from now on.

    Raises:
        OSError: not permitted, or no such namespace.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        _call_libc("setns", handle, CLONE_NEWNET)
    finally:
        os.close(handle)


def leave_for_a_new_namespace() -> None:
    """The calling thread gets a namespace of its own, in which there is nothing but a loopback interface.

    Raises:
        OSError: not permitted.
    """
    _call_libc("unshare", CLONE_NEWNET)


def _call_libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


COMMAND_LIMIT_S = 20.0
CALL_LIMIT_S = 120.0
T = TypeVar("T")


class CommandFailedError(RuntimeError):
    """`ip` or `tc` refused something."""


def tool_path(tool: str) -> str | None:
    """Where a command of the system's administration is: not every user's PATH has its folders."""
    return shutil.which(
        tool, path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))
    )


def run_here(*command: str) -> str:
    """A command of this machine's own network, and its output.

    Raises:
        CommandFailedError: with what it said.
    """
    found = (tool_path(command[0]) or command[0], *command[1:])
    ended = subprocess.run(found, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
    if ended.returncode != 0:
        raise CommandFailedError(f"`{' '.join(command)}`: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout


class Namespace:
    """`path` is where processes of this machine enter it, while it is open."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._inside = ThreadPoolExecutor(
            1, thread_name_prefix=f"namespace {name}", initializer=leave_for_a_new_namespace
        )
        try:
            self.path: str = self.call(_own_path)
        except BaseException:
            self._inside.shutdown()
            raise

    def close(self) -> None:
        """Sockets and processes inside hold the namespace until they end."""
        self._inside.shutdown()

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done inside: its sockets and processes are of this namespace."""
        return self._inside.submit(work).result(CALL_LIMIT_S)

    def run(self, *command: str) -> str:
        """A command inside, and its output.

        Raises:
            CommandFailedError: with what it said.
        """
        return self.call(functools.partial(run_here, *command))

    def start(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[bytes]":
        """A process inside, in a group of its own; its output goes to `log`. `env` None: the test's own."""

        def start() -> "subprocess.Popen[bytes]":
            with log.open("ab") as output:
                return subprocess.Popen(
                    command, stdout=output, stderr=output, start_new_session=True, env=env
                )

        return self.call(start)


def _own_path() -> str:
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


@functools.cache
def why_no_namespaces() -> str | None:
    """Why this machine cannot have hosts; None: it can."""
    missing = [tool for tool in ("ip", "tc") if tool_path(tool) is None]
    if missing:
        return f"no `{'`, no `'.join(missing)}`: the package iproute2 has them"
    try:
        namespace = Namespace("probe")
    except Exception as error:  # of the thread's initializer nothing but BrokenThreadPool comes through
        return f"network namespaces cannot be made here, which root may: {error}"
    try:
        namespace.run("ip", "link", "add", "probe", "type", "veth", "peer", "name", "other")
        namespace.run("ip", "link", "add", "bridge", "type", "bridge")
        namespace.run(
            "tc",
            "qdisc",
            "add",
            "dev",
            "probe",
            "root",
            "tbf",
            "rate",
            "1gbit",
            "burst",
            "1mb",
            "limit",
            "1mb",
        )
        namespace.run("tc", "qdisc", "add", "dev", "probe", "clsact")
    except CommandFailedError as error:
        return f"this kernel has not got what hosts need: {error}"
    finally:
        namespace.close()
    return None


def require_namespaces() -> None:
    """Skips the test, with the reason, where there are none."""
    why = why_no_namespaces()
    if why is not None:
        pytest.skip(why)
