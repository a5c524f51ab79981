"""The priority of a thread of an encoder's team."""

import os
import threading

from triptych_vllm_connector.worker.cores.core_share import COMPUTE_NICE, LOWEST_PRIORITY, lower_thread


def test_a_lowered_thread_comes_after_others_and_interrupts_none() -> None:
    found: list[tuple[int, int]] = []

    def lower() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        lower_thread(0)
        found.append((os.getpriority(os.PRIO_PROCESS, 0) - before, os.sched_getscheduler(0)))

    thread = threading.Thread(target=lower)
    thread.start()
    thread.join()
    assert found == [
        (min(COMPUTE_NICE, LOWEST_PRIORITY - os.getpriority(os.PRIO_PROCESS, 0)), os.SCHED_BATCH)
    ]
