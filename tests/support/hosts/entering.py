"""How a thread gets into a network namespace. Python has it from 3.12 on; here it is libc's."""

import ctypes
import os

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
