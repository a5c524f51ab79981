"""Supervisor daemon: what `up` leaves running, and how `down` ends it.

`up` starts it with one end of a pipe. Until the system is ready, or has failed, the daemon writes its
progress there, one JSON object per line; then it closes the pipe and keeps running.
"""

import asyncio
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel

from triptych_cli.settings import caller_environment
from triptych_cli.supervisor.autoscaler import Autoscaler, ScalingRules
from triptych_cli.supervisor.control import serving_requests
from triptych_cli.supervisor.launch import Launch
from triptych_cli.supervisor.process import is_same_session, session_members
from triptych_cli.supervisor.rotating_log import shift_logs
from triptych_cli.supervisor.service import StartFailedError
from triptych_cli.supervisor.state import SystemStatus, read_status, try_write_status
from triptych_cli.supervisor.supervisor import (
    AlreadyRunningError,
    clear_leftovers,
    ended_by_signals,
    is_supervised,
    run_directory,
)
from triptych_cli.system.layout import SUPERVISOR, RunLayout
from triptych_cli.system.machine import LaunchError
from triptych_cli.system.shared_secrets import SharedSecretError
from triptych_common.domain.errors import TriptychError

STOP_LIMIT_S = 180.0  # longer than the stop limits of all waves of `plan` together


class StartReport(BaseModel):
    """One line on the progress pipe."""

    kind: Literal["status", "ready", "failed"]
    status: SystemStatus | None = None
    message: str = ""
    log_file: str | None = None


class StartReportPipe:
    """The daemon's end of the pipe; closes when the reader has ended."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def send(self, report: StartReport) -> None:
        if self._descriptor is not None:
            try:
                os.write(self._descriptor, report.model_dump_json().encode() + b"\n")
            except BrokenPipeError:
                self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


async def supervise(launch: Launch, pipe: StartReportPipe, rules: ScalingRules) -> int:
    """Run the system until SIGTERM or SIGINT; returns the exit code."""
    layout = launch.layout

    def on_change(status: SystemStatus) -> None:
        if layout.run_dir.exists():
            try_write_status(layout.state_file, status)
        pipe.send(StartReport(kind="status", status=status))

    try:
        with run_directory(layout):
            supervisor = launch.supervisor(on_change)
            with ended_by_signals(supervisor):
                async with supervisor.running():
                    pipe.send(StartReport(kind="ready", status=supervisor.status()))
                    pipe.close()
                    async with serving_requests(supervisor, layout.control_socket):
                        await Autoscaler(supervisor, rules).run()  # a signal ends it
    except StartFailedError as error:
        pipe.send(StartReport(kind="failed", message=str(error), log_file=str(error.log_file)))
        return 1
    except (
        AlreadyRunningError, LaunchError, SharedSecretError, TriptychError, ValueError, OSError
    ) as error:  # fmt: skip
        pipe.send(StartReport(kind="failed", message=str(error)))
        return 1
    except asyncio.CancelledError:
        return 0
    finally:
        pipe.close()
    return 0


def spawn(options: str, layout: RunLayout, *, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the daemon in its own session; returns the process and the read end of its pipe.

    `env` overrides the caller's environment.
    """
    layout.logs_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_file = layout.log_file(SUPERVISOR)
    if log_file.exists():
        shift_logs(log_file)
    reading, writing = os.pipe()
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "triptych_cli", "supervise", "--progress-fd", str(writing), options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
            start_new_session=True,
            cwd=layout.state_dir,
            env={**caller_environment(), **env},
        )
    os.close(writing)
    return process, reading


def read_reports(reading: int) -> Iterator[StartReport]:
    """Reports of the daemon, until it closes its end."""
    with os.fdopen(reading, "rb") as pipe:
        for line in pipe:
            yield StartReport.model_validate_json(line)


def stop_system(layout: RunLayout) -> list[str]:
    """End the system, supervised or not; returns descriptions of what is left."""
    status = read_status(layout.state_file)
    if status is not None and is_supervised(layout):
        _end_process(status.supervisor_pid)
    if layout.run_dir.is_dir() and not is_supervised(layout):
        clear_leftovers(layout)
        shutil.rmtree(layout.run_dir, ignore_errors=True)
    left = [
        f"process {member.pid} of {service.name}"
        for service in (status.services if status else ())
        if service.pid is not None and is_same_session(service.pid, service.pid_started_at)
        for member in session_members(service.pid)
    ]
    if layout.run_dir.exists():
        left.append(str(layout.run_dir))
    return left


def _end_process(pid: int) -> None:
    """Send SIGTERM and wait; SIGKILL after `STOP_LIMIT_S`."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for number, limit_s in ((signal.SIGTERM, STOP_LIMIT_S), (signal.SIGKILL, 10.0)):
            signal.pidfd_send_signal(descriptor, number)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)  # a stopped one takes no other
            if select.select([descriptor], [], [], limit_s)[0]:  # readable when the process has ended
                return
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)
