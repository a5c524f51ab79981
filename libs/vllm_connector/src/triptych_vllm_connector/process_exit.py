"""Exit of processes that a host has started: with the host, and without the last garbage collection."""

import atexit
import ctypes
import fcntl
import gc
import multiprocessing
import os
import select
import signal

_PR_SET_PDEATHSIG = 1


def end_with_peer(fd: int) -> None:
    """Make the kernel end this process, even in C code, when the other end of `fd` is closed.

    The default action of SIGIO ends a process. `fd` is a socket or the read end of a pipe, to which nothing
    more is sent.
    """
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)
    if poll.poll(0):  # closed before that
        os._exit(0)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def leave_signals_to_host() -> None:
    """Make EngineCore and its workers ignore terminal signals; their parent ends them. Idempotent.

    A terminal's Ctrl-C, and `kill` of a process group, reach every process of the group: vLLM would abort
    what the host still drains. So this process gets a group of its own. The session stays the same, so that a
    supervisor still finds all of them.
    """
    host = multiprocessing.parent_process()
    if host is None:
        return  # the engine runs inside the host, and gets its signals
    if os.getpid() not in (os.getpgrp(), os.getsid(0)):
        os.setpgid(0, 0)
    # A parent that is killed cannot end us any more, so the kernel does. SIGTERM: vLLM tidies up.
    end_with_parent()
    # It may have died before that: then the kernel sends nothing. (A fork server is a parent, too.)
    if os.getppid() != host.pid and not host.is_alive():
        os.kill(os.getpid(), signal.SIGTERM)


def end_quickly() -> None:
    """Skip the interpreter's last garbage collection. Idempotent.

    It walks about a million objects of torch, transformers and vLLM, for seconds, one after the other in
    worker, EngineCore and host. The memory goes with the process all the same.
    """
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
