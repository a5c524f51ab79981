"""Which exceptions invite another attempt."""

import errno
from concurrent.futures import BrokenExecutor

import pytest

from triptych_common.domain.transient import is_transient


def caused(error: Exception, cause: Exception) -> Exception:
    """`error`, raised from `cause`."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        TimeoutError(),
        BrokenExecutor(),
        OSError(errno.ENOMEM, "no memory"),
        OSError(errno.EMFILE, "too many open files"),
        OSError("out of memory error when reading image file"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("can't start new thread"),
        caused(ValueError("the processor failed"), MemoryError()),
    ],
)
def test_of_the_machine(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("out of memory"),
        OSError("image file is truncated"),
        OSError(errno.ENOENT, "no such file"),
        SyntaxError("broken PNG file"),
        RuntimeError("shape mismatch"),
        caused(ValueError("x"), KeyError("y")),
    ],
)
def test_of_the_data(error: Exception) -> None:
    assert not is_transient(error)


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_transient(first)
