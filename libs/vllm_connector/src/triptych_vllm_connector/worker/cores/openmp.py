"""The OpenMP runtime of this process, called directly: how many threads a team has, and which they are.

vLLM replaces `torch.set_num_threads`, which also drops oneDNN's caches; the runtime's own function sets a
number of the calling thread, and costs a microsecond. A team of one leaves the runtime's other threads
asleep; they are there when the next team needs them.
"""

import ctypes
import os
import re
import threading
from pathlib import Path
from typing import Any

_RUNTIMES = re.compile(r"lib(?:gomp|iomp5|omp)")
_REGION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class OpenMp:
    """For the thread that computes: the numbers are those of the thread that sets them."""

    def __init__(self, library: Any) -> None:
        """`library`: has the functions of OpenMP, and `GOMP_parallel`, which Intel's and LLVM's have too."""
        self._library = library
        self._library.GOMP_parallel.argtypes = [_REGION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

    @classmethod
    def of_process(cls) -> "OpenMp | None":
        """The preloaded runtime, as vLLM starts its workers: every library finds its functions first.

        Else the only one; None: none is loaded, or several are, so that no number would hold for all.
        """
        everything = ctypes.CDLL(None)
        if hasattr(everything, "GOMP_parallel"):
            return cls(everything)
        paths = {
            os.path.realpath(path)
            for line in Path("/proc/self/maps").read_text().splitlines()
            if _RUNTIMES.match(name := (path := line.split(maxsplit=5)[-1]).rpartition("/")[2])
            and ".so" in name
        }
        return cls(ctypes.CDLL(paths.pop())) if len(paths) == 1 else None

    def num_threads(self) -> int:
        """Of the teams that the calling thread starts."""
        return int(self._library.omp_get_max_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """For the teams that the calling thread starts from now on."""
        self._library.omp_set_num_threads(num_threads)

    def team(self, num_threads: int) -> frozenset[int]:
        """The kernel's ids of a team's threads, the calling one among them. Starts those that are missing."""
        ids: set[int] = set()

        def region(_: object) -> None:
            ids.add(threading.get_native_id())

        self._library.GOMP_parallel(_REGION(region), None, num_threads, 0)
        return frozenset(ids)
