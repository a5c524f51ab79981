"""Ends of processes that a test or a benchmark has started."""

import contextlib
import os
import signal
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.real.warm.client import ForkedProcess

STOP_TIMEOUT_S = 15.0
GROUP_STOP_TIMEOUT_S = 120.0
"""Seconds in which an engine ends, also on a busy machine."""


def end_process(process: "subprocess.Popen[bytes]", with_signal: signal.Signals = signal.SIGTERM) -> int:
    """Send the signal, wait, and kill a process that does not end in time; returns its exit status."""
    process.send_signal(with_signal)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(STOP_TIMEOUT_S)


def end_group(process: "ForkedProcess | subprocess.Popen[bytes]") -> None:
    """End the process by SIGTERM, and then whatever is left of its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GROUP_STOP_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
