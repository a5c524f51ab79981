"""Where the threads of an encoder's host run, in processes of their own."""

import json
import os
import subprocess
import sys

STAY = """
import json, os, sys, threading
from triptych_encoder.host_threads import stay_off
go, places = threading.Event(), []
def note():
    go.wait()
    places.append(sorted(os.sched_getaffinity(0)))
before = threading.Thread(target=note)
before.start()
stay_off(json.loads(sys.argv[1]))
after = threading.Thread(target=note)
after.start()
go.set()
before.join()
after.join()
print(json.dumps([sorted(os.sched_getaffinity(0)), *places]))
"""


def placed(others: list[int]) -> list[list[int]]:
    """Cores of the process's first thread, of one that it had started, and of one that it starts then."""
    done = subprocess.run([sys.executable, "-c", STAY, json.dumps(others)], capture_output=True, check=True)
    cores: list[list[int]] = json.loads(done.stdout)
    return cores


def test_its_threads_run_on_no_core_of_another_engine() -> None:
    first, *others = sorted(os.sched_getaffinity(0))
    assert placed([*others, max(first, *others, 0) + 1]) == [[first]] * 3


def test_where_no_core_is_left_threads_stay() -> None:
    usable = sorted(os.sched_getaffinity(0))
    assert placed(usable) == [usable] * 3
