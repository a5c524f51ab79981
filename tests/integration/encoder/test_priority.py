"""An encoder's priority, in processes of their own: it cannot be raised again."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from triptych_encoder.priority import NICE

LOWER = """
import os, pathlib, threading
from triptych_encoder.priority import lower_priority
lower_priority()
started = []
thread = threading.Thread(target=lambda: started.append(os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
autogroup = pathlib.Path("/proc/self/autogroup")
print(os.getpriority(os.PRIO_PROCESS, 0), *started)
print(autogroup.read_text() if autogroup.exists() else "")
"""
has_autogroups = Path("/proc/self/autogroup").exists()


def lowered(*, new_session: bool) -> tuple[int, int, int | None]:
    """Of the process, of a thread that it starts then, and of its session; none: it has no group of its own,
    which is so in the first session of a container, or if this Linux has no autogroups or they are off.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOWER],
        start_new_session=new_session,
        capture_output=True,
        check=True,
        text=True,
    )
    first, _, autogroup = done.stdout.partition("\n")
    process, thread = first.split()
    session = re.search(r"nice (-?\d+)", autogroup)
    return int(process), int(thread), int(session[1]) if session else None


def test_the_process_and_what_it_starts_are_lowered() -> None:
    assert lowered(new_session=True)[:2] == (NICE, NICE)


@pytest.mark.skipif(not has_autogroups, reason="this Linux has no autogroups")
def test_its_own_session_is_lowered_and_no_other() -> None:
    before = Path("/proc/self/autogroup").read_text()
    assert lowered(new_session=True)[2] in (NICE, None)
    lowered(new_session=False)
    assert Path("/proc/self/autogroup").read_text() == before
