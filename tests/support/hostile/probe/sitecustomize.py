"""Probe of a process's event loop: how long it stops, in CPU seconds of its thread and in seconds.

Python imports this module at the start of each process whose `PYTHONPATH` names its folder. It writes
`LOOP_PROBE_DIR/<pid>.json` for each process that runs `asyncio.Runner`: the longest stop by each clock, and
for a stop of `STACK_S` or more where the loop's thread was.

When `LOOP_PROBE_DIR/reset` is touched all counts begin anew.

A timer of the loop fires every `BEAT_S`. The thread's CPU time between two beats is what callbacks took
meanwhile; it does not grow while the thread waits for a core or for the interpreter's lock.
"""

import asyncio
import contextlib
import functools
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

BEAT_S = 0.005
LOOK_S = 0.05
STACK_S = 0.1
MAX_STOPS = 200
MAX_FRAMES = 12


class Probe:
    """The beats of one loop, and the thread that looks at them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self._loop, self._file = loop, folder / f"{os.getpid()}.json"
        self._reset_file, self._reset_at = folder / "reset", 0
        self._thread_id = threading.get_ident()
        self._clock_id = time.pthread_getcpuclockid(self._thread_id)
        self._cpu_s = time.clock_gettime(self._clock_id)
        self._wall_s = time.monotonic()
        self._longest_cpu_s = self._longest_wall_s = 0.0
        self._stack: list[str] = []
        self._stops: list[dict[str, Any]] = []
        self._beat()
        threading.Thread(target=self._look, name="loop-probe", daemon=True).start()

    def _beat(self) -> None:
        now, cpu = time.monotonic(), time.clock_gettime(self._clock_id)
        cpu_s, wall_s = cpu - self._cpu_s, now - self._wall_s - BEAT_S
        self._longest_cpu_s = max(self._longest_cpu_s, cpu_s)
        self._longest_wall_s = max(self._longest_wall_s, wall_s)
        if cpu_s >= STACK_S and len(self._stops) < MAX_STOPS:
            self._stops.append({"at": time.time(), "cpu_s": cpu_s, "wall_s": wall_s, "stack": self._stack})
        self._stack, self._cpu_s, self._wall_s = [], cpu, now
        self._loop.call_later(BEAT_S, self._beat)

    def _look(self) -> None:
        while not self._loop.is_closed():
            time.sleep(LOOK_S)
            if not self._stack and time.clock_gettime(self._clock_id) - self._cpu_s > STACK_S / 2:
                frame = sys._current_frames().get(self._thread_id)
                if frame is not None:
                    self._stack = [
                        f"{each.filename}:{each.lineno} {each.name}"
                        for each in traceback.extract_stack(frame)[-MAX_FRAMES:]
                    ]
            with contextlib.suppress(OSError):  # nothing was reset yet
                reset_at = self._reset_file.stat().st_mtime_ns
                if reset_at != self._reset_at:
                    self._reset_at = reset_at
                    self._longest_cpu_s, self._longest_wall_s, self._stops = 0.0, 0.0, []
            self._write()

    def _write(self) -> None:
        found = {
            "pid": os.getpid(),
            "command": sys.argv,
            "longest_cpu_s": self._longest_cpu_s,
            "longest_wall_s": self._longest_wall_s,
            "stops": self._stops,
        }
        part = self._file.with_suffix(".part")
        with contextlib.suppress(OSError):  # the folder is gone
            part.write_text(json.dumps(found))
            part.replace(self._file)


def _install(folder: Path) -> None:
    run = asyncio.Runner.run

    @functools.wraps(run)
    def run_probed(runner: asyncio.Runner, coro: Any, **kwargs: Any) -> Any:
        async def probed() -> Any:
            Probe(asyncio.get_running_loop(), folder)
            return await coro

        return run(runner, probed(), **kwargs)

    asyncio.Runner.run = run_probed  # type: ignore[method-assign, assignment]


if "LOOP_PROBE_DIR" in os.environ:
    _install(Path(os.environ["LOOP_PROBE_DIR"]))
