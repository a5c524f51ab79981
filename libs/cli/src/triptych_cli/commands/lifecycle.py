"""`up`, `down`, `status`, `logs`: the system left running on this machine."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from rich.markup import escape

from triptych_cli.commands.tables.compute_table import compute_table
from triptych_cli.commands.tables.instance_table import read_instances
from triptych_cli.commands.tables.transport_table import pairs_table
from triptych_cli.console import StartProgress, err, fail, out, plain_table, show_tail
from triptych_cli.options import SystemOptions
from triptych_cli.settings import CliSettings
from triptych_cli.supervisor import daemon
from triptych_cli.supervisor.launch import prepare
from triptych_cli.supervisor.state import ServiceState, SystemStatus, read_status
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.layout import RunLayout, lasting_layout
from triptych_cli.system.machine import LaunchError
from triptych_common.domain.errors import TriptychError
from triptych_common.telemetry import setup_logging

STATE_COLOURS = {
    ServiceState.READY: "green",
    ServiceState.STARTING: "cyan",
    ServiceState.WAITING: "dim",
    ServiceState.BACKOFF: "yellow",
    ServiceState.STOPPING: "cyan",
    ServiceState.STOPPED: "dim",
}


def up(options: SystemOptions) -> int:
    """Start the system in the background, and return when it is ready."""
    settings = CliSettings()
    layout = lasting_layout(settings)
    if is_supervised(layout):
        fail("a system is running already: ./triptych status shows it, ./triptych down ends it")
        return 1
    try:
        prepare(options, layout, deployment=settings.deployment)  # refuse here what cannot work
    except LaunchError as error:
        fail(str(error))
        return 1
    process, reading = daemon.spawn(options.argument(), layout, env=options.environment())
    try:
        return _follow_start(process, reading, layout)
    except KeyboardInterrupt:
        err.print("\nstopping ...")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=daemon.STOP_LIMIT_S)
        return 130


def _follow_start(process: subprocess.Popen[bytes], reading: int, layout: RunLayout) -> int:
    last: daemon.StartReport | None = None
    with StartProgress() as progress:
        for last in daemon.read_reports(reading):
            if last.status is not None:
                progress.update(last.status)
    if last is not None and last.kind == "ready" and last.status is not None:
        _show_endpoint(last.status)
        return 0
    process.wait(timeout=daemon.STOP_LIMIT_S)
    failed = last is not None and last.kind == "failed"
    fail(last.message if last is not None and failed else "the supervisor ended without a report")
    log_file = last.log_file if last is not None and failed else str(layout.state_dir / daemon.SUPERVISOR_LOG)
    if log_file:
        show_tail(Path(log_file))
    return 1


def _show_endpoint(status: SystemStatus) -> None:
    name = Path(status.model).name if status.model.startswith("/") else status.model
    out.print(f"\n[bold]{status.endpoint}[/] serves the OpenAI API. For example:\n")
    out.print(
        f"  IMAGE=$(base64 -w0 models/digits-vl/samples/strip-04.png)\n"
        f"  curl -s {status.endpoint}/chat/completions -H 'Content-Type: application/json' -d '{{\n"
        f'    "model": "{name}", "messages": [{{"role": "user", "content": [\n'
        f'      {{"type": "image_url", "image_url": {{"url": "data:image/png;base64,'
        "'\"$IMAGE\"'"
        '"}},\n'
        '      {"type": "text", "text": "read the digits"}]}]}\'\n',
        markup=False,
        soft_wrap=True,
    )
    out.print("[dim]./triptych status | logs SERVICE | trace REQUEST_ID | down[/]")


def down() -> int:
    """End the system and make sure that nothing is left of it."""
    layout = lasting_layout(CliSettings())
    if not layout.run_dir.exists():
        out.print("nothing is running")
        return 0
    with out.status("stopping ..."):
        left = daemon.stop_system(layout)
    if left:
        fail(f"not everything could be ended: {', '.join(left)}")
        return 1
    out.print("stopped; no process, socket or shared memory is left")
    return 0


def status() -> int:
    """A table of the services; 0 when all are ready, 1 when not, 3 when nothing runs.

    Of a system that `up` has not started: what is registered; 0 when an instance serves requests, else 1.
    """
    settings = CliSettings()
    layout = lasting_layout(settings)
    current = read_status(layout.state_file)
    if current is None and settings.redis_url is not None:
        return _show_registered()
    if current is None:
        out.print("nothing is running")
        return 3
    supervised = is_supervised(layout)
    if not supervised:
        fail("the supervisor was killed; ./triptych down clears what it left")
    numbers = ("pid", "restarts", "for")
    table = plain_table("service", "state", *numbers, "", right=numbers)
    for service in current.services:
        lasted = timedelta(seconds=int(time.time() - service.since))
        table.add_row(
            service.name,
            f"[{STATE_COLOURS[service.state]}]{service.state}[/]",
            str(service.pid or ""),
            str(service.num_restarts),
            str(lasted),
            escape(service.detail),
        )
    out.print(table)
    out.print(
        f"[dim]{current.endpoint}  model {escape(current.model)}  supervisor {current.supervisor_pid}[/]"
    )
    _show_metrics(current)
    ready = all(service.state is ServiceState.READY for service in current.services)
    if supervised:
        _show_engines()
        _show_pairs()
    return 0 if supervised and ready else 1


def _show_registered() -> int:
    try:
        instances = asyncio.run(read_instances())
    except (TriptychError, OSError) as error:
        fail(str(error))
        return 1
    out.print(instances.table)
    _show_engines()
    _show_pairs()
    return 0 if instances.can_serve else 1


def _show_metrics(current: SystemStatus) -> None:
    ports = {each.name: each.metrics_port for each in current.services if each.metrics_port is not None}
    if ports:
        table = plain_table("metrics of", "for Prometheus")
        for name, port in ports.items():
            table.add_row(name, f"http://127.0.0.1:{port}/metrics")
        out.print(table)


def _show_engines() -> None:
    try:
        out.print(asyncio.run(compute_table()))
    except (TriptychError, OSError) as error:
        out.print(f"[dim]engines are not known: {escape(str(error))}[/]")


def _show_pairs() -> None:
    try:
        out.print(asyncio.run(pairs_table()))
    except (TriptychError, OSError) as error:
        out.print(f"[dim]transports are not known: {escape(str(error))}[/]")


def logs(service: str, follow: bool, num_lines: int) -> int:
    """The end of a service's log; `follow`: and what is added, until Ctrl-C."""
    layout = lasting_layout(CliSettings())
    known = sorted(file.stem for file in layout.logs_dir.glob("*.log"))
    matches = [name for name in known if service in (name, name.rpartition("-")[0])]
    if not matches:
        fail(f"no log of {service}; there are: {', '.join(known) or 'none'}")
        return 1
    file = layout.log_file(matches[0])
    command = ["tail", "-n", str(num_lines), *(["-F"] if follow else []), str(file)]
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        return subprocess.run(command, check=False).returncode
    return 0


def supervise(options: SystemOptions, progress_fd: int) -> int:
    """The daemon itself."""
    setup_logging("supervisor", "supervisor", "WARNING")  # stderr is its log file
    settings = CliSettings()
    pipe = daemon.StartReportPipe(progress_fd)
    try:
        launch = prepare(options, lasting_layout(settings), deployment=settings.deployment)
    except LaunchError as error:
        pipe.send(daemon.StartReport(kind="failed", message=str(error)))
        return 1
    return asyncio.run(daemon.supervise(launch, pipe))
