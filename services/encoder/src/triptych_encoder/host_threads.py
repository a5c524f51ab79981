"""Priority of an encoder on shared cores, and placement of its host's threads.

The priority is a little below that of other programs. With nice 10 and `SCHED_BATCH`, images took ten times
as long as in vLLM on a machine with other work; with nice 0, the longest gaps of text doubled on an idle one.
"""

import os
from collections.abc import Collection
from pathlib import Path

import tenacity

from triptych_common.cores.usable import usable_cores
from triptych_common.telemetry.logs import get_logger

log = get_logger(__name__)

NICE = 5
WRITE_TIMEOUT_S = 5.0
_SESSION_PRIORITY = Path("/proc/self/autogroup")
_THREADS = Path("/proc/self/task")


def lower_priority() -> None:
    """Lower the priority of this thread, of what it starts, and of the session if it leads one.

    Linux shares a core among sessions first where it has autogroups, and by nice values only within each. On
    a core on which another session computes without pause, a gateway's thread that woke was seen to wait for
    up to 150 ms (6.18, two cores); with that session lowered it does not. Without privileges this cannot be
    taken back.
    """
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    if os.getsid(0) != os.getpid():
        return  # a shell's: not ours to change
    try:
        _lower_session()
    except OSError as error:
        log.info("session priority not lowered", reason=str(error))


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(BlockingIOError),
    stop=tenacity.stop_after_delay(WRITE_TIMEOUT_S),
    wait=tenacity.wait_random(0.05, 0.2),
    reraise=True,
)
def _lower_session() -> None:
    """Lower the session's autogroup; Linux accepts one such write per 0.1 s, over all processes of a host."""
    _SESSION_PRIORITY.write_text(str(NICE))


def stay_off(others: Collection[int]) -> None:
    """Keep this process's threads, and those that they start, off cores that other engines own.

    Called after this encoder's engine has started, which may borrow what its affinity allows. If the kernel
    refuses, or no core is left, threads stay where they are.
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
