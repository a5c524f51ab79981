"""Exceptions that are worth a retry because the input did not cause them. Pure."""

import errno
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor

_TRANSIENT_ERRNOS = frozenset(
    {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EAGAIN, errno.EIO, errno.ENOBUFS}
)
# Libraries that raise no MemoryError for it: Pillow's decoders, torch on the CPU and on a GPU.
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


def is_transient(error: BaseException) -> bool:
    """Return whether the machine (memory, files, threads, time) caused `error`."""
    return any(map(_is_transient, _chain(error)))


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, TimeoutError, BrokenExecutor)):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _TRANSIENT_ERRNOS
    if isinstance(error, (OSError, RuntimeError)):
        text = str(error).lower()
        return "can't start new thread" in text or any(each in text for each in _OUT_OF_MEMORY)
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its causes, each once."""
    seen: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in seen:
        seen.add(id(following))
        yield following
        following = following.__cause__ or following.__context__
