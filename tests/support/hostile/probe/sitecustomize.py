"""Probe of the loops that all callers share: how long one stops, in CPU seconds of its thread and in seconds.

    event loop         gateway, host of an engine: a timer fires every `BEAT_S`
    EngineCore's loop  each message that it handles, and each step with what the runner does in it

Python imports this module at the start of each process whose `PYTHONPATH` names its folder. It writes
`LOOP_PROBE_DIR/<pid>-<thread>.json` for each such loop: the longest stop by each clock, and for a
stop of `STACK_S` or more where the loop's thread was. The thread's CPU time between two beats does not grow
while the thread waits for a core or for the interpreter's lock.

That lock has a measure of its own: a second thread looks every `LOOK_S`. What it comes late, without its wait
for a core, and not more than the CPU time of the process meanwhile, is how long the lock was kept from all.

When `LOOP_PROBE_DIR/reset` is touched all counts begin anew.
"""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

BEAT_S = 0.005
LOOK_S = 0.05
STACK_S = 0.1
MAX_STOPS = 200
MAX_FRAMES = 12


class Probe:
    """The beats of one loop, and the thread that looks at them. Made in the loop's thread."""

    def __init__(self, loop: str, folder: Path) -> None:
        thread = threading.current_thread()
        self._name = loop if thread is threading.main_thread() else f"{loop} of thread {thread.name}"
        self._file = folder / f"{os.getpid()}-{thread.native_id}.json"
        self._reset_file, self._reset_at = folder / "reset", 0
        self._thread_id = threading.get_ident()
        self._clock_id = time.pthread_getcpuclockid(self._thread_id)
        self._cpu_s = time.clock_gettime(self._clock_id)
        self._wall_s = time.monotonic()
        self._longest_cpu_s = self._longest_wall_s = self._longest_lock_s = 0.0
        self._stack: list[str] = []
        self._stops: list[dict[str, Any]] = []
        threading.Thread(target=self._look, name="loop-probe", daemon=True).start()

    def beat(self, idle_s: float = 0.0) -> None:
        """Count what the loop's thread has done since the last beat.

        Args:
            idle_s: of wall time that is no stop.
        """
        now, cpu = time.monotonic(), time.clock_gettime(self._clock_id)
        cpu_s, wall_s = cpu - self._cpu_s, now - self._wall_s - idle_s
        self._longest_cpu_s = max(self._longest_cpu_s, cpu_s)
        self._longest_wall_s = max(self._longest_wall_s, wall_s)
        if cpu_s >= STACK_S:
            self._note(cpu_s, wall_s, self._stack)
        self.skip()

    def skip(self) -> None:
        """Leave out what the loop's thread has done since the last beat."""
        self._stack, self._cpu_s = [], time.clock_gettime(self._clock_id)
        self._wall_s = time.monotonic()

    def _note(self, cpu_s: float, wall_s: float, stack: Sequence[str]) -> None:
        if len(self._stops) < MAX_STOPS:
            self._stops.append({"at": time.time(), "cpu_s": cpu_s, "wall_s": wall_s, "stack": [*stack]})

    def _look(self) -> None:
        before = _Look.now()
        while True:
            time.sleep(LOOK_S)
            if not self._stack and time.clock_gettime(self._clock_id) - self._cpu_s > STACK_S / 2:
                self._stack = _stack(sys._current_frames().get(self._thread_id))
            look = _Look.now()
            lock_s = look.kept_since(before)
            self._longest_lock_s = max(self._longest_lock_s, lock_s)
            if lock_s >= STACK_S:
                places = [each for frame in sys._current_frames().values() for each in _stack(frame)[-3:]]
                self._note(lock_s, look.wall_s - before.wall_s, ["the interpreter's lock", *places])
            with contextlib.suppress(OSError):  # nothing was reset yet
                reset_at = self._reset_file.stat().st_mtime_ns
                if reset_at != self._reset_at:
                    self._reset_at = reset_at
                    self._longest_cpu_s = self._longest_wall_s = self._longest_lock_s = 0.0
                    self._stops = []
            self._write()
            before = _Look.now()

    def _write(self) -> None:
        found = {
            "pid": os.getpid(),
            "loop": self._name,
            "longest_cpu_s": self._longest_cpu_s,
            "longest_wall_s": self._longest_wall_s,
            "longest_lock_s": self._longest_lock_s,
            "stops": self._stops,
        }
        part = self._file.with_suffix(".part")
        with contextlib.suppress(OSError):  # the folder is gone
            part.write_text(json.dumps(found))
            part.replace(self._file)


class _Look:
    """Clocks of the looking thread, and of its process."""

    def __init__(self, wall_s: float, cpu_s: float, waited_s: float) -> None:
        self.wall_s, self._cpu_s, self._waited_s = wall_s, cpu_s, waited_s

    @classmethod
    def now(cls) -> "_Look":
        waited_ns = Path("/proc/thread-self/schedstat").read_text().split()[1]  # for a core
        return cls(time.monotonic(), time.process_time(), int(waited_ns) / 1e9)

    def kept_since(self, before: "_Look") -> float:
        """Return how long other threads have kept the interpreter's lock since `before`."""
        late_s = self.wall_s - before.wall_s - LOOK_S - (self._waited_s - before._waited_s)
        return max(min(late_s, self._cpu_s - before._cpu_s), 0.0)


def _stack(frame: FrameType | None) -> list[str]:
    frames = [] if frame is None else traceback.extract_stack(frame)[-MAX_FRAMES:]
    return [f"{each.filename}:{each.lineno} {each.name}" for each in frames]


# ---- the loops -----------------------------------------------------------------------------------------
def _probe_event_loops(folder: Path) -> None:
    run = asyncio.Runner.run

    @functools.wraps(run)
    def run_probed(runner: asyncio.Runner, coro: Any, **kwargs: Any) -> Any:
        async def probed() -> Any:
            loop, probe = asyncio.get_running_loop(), Probe("event loop", folder)

            def beat() -> None:
                probe.beat(idle_s=BEAT_S)
                loop.call_later(BEAT_S, beat)

            beat()
            return await coro

        return run(runner, probed(), **kwargs)

    asyncio.Runner.run = run_probed  # type: ignore[method-assign, assignment]


def _probe_engine_core(folder: Path, module: Any) -> None:
    core = module.EngineCoreProc
    run = core.run_busy_loop

    @functools.wraps(run)
    def run_probed(self: Any) -> Any:
        probe = Probe("EngineCore", folder)
        for name in ("_handle_client_request", "_process_engine_step"):
            setattr(self, name, _between_beats(getattr(self, name), probe))
        return run(self)

    core.run_busy_loop = run_probed


def _between_beats(call: Callable[..., Any], probe: Probe) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        probe.skip()
        try:
            return call(*args, **kwargs)
        finally:
            probe.beat()

    return called


class _AfterImport(MetaPathFinder):
    """Calls a function with a module as soon as that is imported."""

    def __init__(self, calls: dict[str, Callable[[ModuleType], None]]) -> None:
        self._calls = calls

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        call = self._calls.pop(fullname, None)
        spec = None if call is None else importlib.util.find_spec(fullname)
        if call is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            call(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


if "LOOP_PROBE_DIR" in os.environ:
    _folder = Path(os.environ["LOOP_PROBE_DIR"])
    _probe_event_loops(_folder)
    sys.meta_path.insert(
        0, _AfterImport({"vllm.v1.engine.core": functools.partial(_probe_engine_core, _folder)})
    )
