"""The sweep: what comes while it runs is not forgotten, and the gauges follow it."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.support.waiting import until
from triptych_gateway.files.file_service import ExpirySweep


class SlowStore:
    """Each look waits until it may go on; the first removes a file. It sees nothing else."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.go = threading.Event()

    def remove_expired(self, max_files: int) -> tuple[int, float | None]:
        self.num_begun += 1
        self.go.wait(10)
        return (1 if self.num_begun == 1 else 0), None


async def test_a_file_that_comes_during_a_sweep_is_swept_too() -> None:
    store, num_measured = SlowStore(), 0

    async def measure() -> None:
        nonlocal num_measured
        num_measured += 1

    with ThreadPoolExecutor(1) as threads:
        untyped: Any = store
        sweep = ExpirySweep(untyped, threads)
        sweep.note_file(time.time() + 60)
        running = asyncio.get_running_loop().create_task(sweep.run(measure))
        await until(lambda: store.num_begun == 1)
        sweep.note_file(time.time() + 90)
        store.go.set()
        await until(lambda: store.num_begun == 2)
        assert num_measured == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
