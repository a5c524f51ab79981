"""Where the threads of an encoder's host run: not on other engines' own cores.

An encoder has the priority of every other program. With a lower one (nice 10, and `SCHED_BATCH`) text was
protected a little better, and on a machine that has other work images took ten times as long as in vLLM.
"""

import os
from collections.abc import Collection
from pathlib import Path

from triptych_common.cores.usable import usable_cores
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

_THREADS = Path("/proc/self/task")


def stay_off(others: Collection[int]) -> None:
    """This process's threads, and those that they start, do not run on cores that other engines own.

    To be called when this encoder's engine has started: it may borrow what its affinity allows. Where the
    kernel refuses it, or no core is left, threads stay where they are.
    """
    cores = set(usable_cores()) - set(others)
    if not cores:
        return
    placed: set[str] = set()
    while threads := {each.name for each in _THREADS.iterdir()} - placed:  # some were started meanwhile
        for thread in threads:
            try:
                os.sched_setaffinity(int(thread), cores)
            except ProcessLookupError:
                continue
            except OSError as error:
                log.info("threads not placed", reason=str(error))
                return
        placed |= threads
