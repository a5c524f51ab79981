"""Loops of other processes that all callers share, watched from inside by `probe/sitecustomize.py`."""

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE = Path(__file__).with_name("probe")


@dataclass(frozen=True)
class LoopStops:
    """The stops of one loop, since its start, or the last reset."""

    pid: int
    loop: str  # event loop or EngineCore; with its thread, if that is not the main thread
    longest_cpu_s: float  # CPU time of the loop's thread between two beats
    longest_wall_s: float
    longest_lock_s: float  # CPU time in which no other thread got the interpreter's lock
    stops: list[dict[str, Any]]  # of 0.1 s of CPU or more: `at`, `cpu_s`, `wall_s`, `stack`


def probe_environment(folder: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what processes need in their environment to write their stops to `folder`."""
    path = os.pathsep.join(filter(None, [str(PROBE), env.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "LOOP_PROBE_DIR": str(folder)}


async def reset_stops(folder: Path) -> None:
    """Have all processes that write to `folder` begin to count anew."""
    (folder / "reset").touch()
    await asyncio.sleep(1.0)  # each looks twenty times a second


def read_stops(folder: Path) -> list[LoopStops]:
    """Return the stops of all loops whose processes write to `folder`."""
    return [LoopStops(**json.loads(file.read_text())) for file in folder.glob("*-*.json")]
