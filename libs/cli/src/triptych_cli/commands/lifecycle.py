"""`up`, `down`, `logs`: a system that keeps running on this machine."""

import asyncio
import contextlib
import io
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from triptych_cli.commands.status import read_registered, show_shortfalls
from triptych_cli.console import Elapsed, StartProgress, err, fail, out, show_tail
from triptych_cli.options import SystemOptions
from triptych_cli.roles import is_named
from triptych_cli.settings import LOOPBACK, CliSettings
from triptych_cli.supervisor import daemon
from triptych_cli.supervisor.autoscaler import ScalingRules
from triptych_cli.supervisor.launch import prepare
from triptych_cli.supervisor.rotating_log import RotatingLog, older_log
from triptych_cli.supervisor.state import HostStatus, SystemStatus
from triptych_cli.supervisor.supervisor import is_supervised
from triptych_cli.system.joining import JoinError, join_target
from triptych_cli.system.layout import SUPERVISOR, RunLayout, lasting_layout
from triptych_cli.system.machine import LaunchError
from triptych_cli.system.preflight import known_config, may_take_images, preflight
from triptych_cli.system.shared_secrets import KEY_FILE_NAME
from triptych_common.telemetry import setup_logging

IMAGE_LINE = "  IMAGE=$(base64 -w0 models/digits-vl/samples/strip-04.png)\n"
IMAGE_PART = """
      {"type": "image_url", "image_url": {"url": "data:image/png;base64,'"$IMAGE"'"}},"""
TEXT_PART = '{"type": "text", "text": "read the digits"}'


def up(options: SystemOptions, join: str | None = None) -> int:
    """Start the system in the background; return when it is ready.

    `join` makes this machine a host of a system elsewhere: the URL of its Redis, or its first host's folder.
    """
    settings = CliSettings()
    layout = lasting_layout(settings)
    if is_supervised(layout):
        fail("a system is running already: ./triptych status shows it, ./triptych down ends it")
        return 1
    try:
        if join is not None:
            options = joined(options, join)
        preflight(prepare(options, layout, deployment=settings.deployment).options)
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


def joined(options: SystemOptions, join: str) -> SystemOptions:
    """Options with the Redis and the key of the system to join.

    Raises:
        LaunchError: `join` is neither a URL nor such a folder.
    """
    try:
        target = join_target(join)
    except JoinError as error:
        raise LaunchError(str(error)) from None
    key_file = options.hosts.fabric_key_file
    if key_file is None and target.folder is not None and (target.folder / KEY_FILE_NAME).exists():
        key_file = str(target.folder / KEY_FILE_NAME)
    hosts = replace(options.hosts, fabric_key_file=key_file)
    return replace(options, redis_url=target.redis_url, hosts=hosts)


def _follow_start(process: subprocess.Popen[bytes], reading: int, layout: RunLayout) -> int:
    last: daemon.StartReport | None = None
    with StartProgress() as progress:
        for last in daemon.read_reports(reading):
            if last.status is not None:
                progress.update(last.status)
    if last is not None and last.kind == "ready" and last.status is not None:
        show_shortfalls(last.status.model, read_registered())
        if last.status.endpoint:
            _show_reach(CliSettings().host)
            _show_endpoint(last.status)
        if last.status.host is not None:
            _show_host(last.status.host)
        out.print("[dim]./triptych status | logs SERVICE | trace REQUEST_ID | down[/]")
        return 0
    process.wait(timeout=daemon.STOP_LIMIT_S)
    failed = last is not None and last.kind == "failed"
    fail(last.message if last is not None and failed else "the supervisor ended without a report")
    log_file = last.log_file if last is not None and failed else str(layout.log_file(SUPERVISOR))
    if log_file:
        show_tail(Path(log_file))
    return 1


def _show_reach(host: str) -> None:
    """Warn if callers on other machines can reach the gateway."""
    if host != LOOPBACK:
        out.print(
            f"[yellow]![/] the gateway listens on {host} (TRIPTYCH_HOST): every caller that reaches it is "
            "served, unless TRIPTYCH_API_KEYS is set (docs/operations/security.md)",
            soft_wrap=True,
        )


def _show_endpoint(status: SystemStatus) -> None:
    name = Path(status.model).name  # as it is served, unless TRIPTYCH_SERVED_MODEL_NAME says otherwise
    out.print(f"\n[bold]{status.endpoint}[/] serves the OpenAI API. For example:\n")
    takes_images = may_take_images(known_config(status.model))
    content = f"[{IMAGE_PART}\n      {TEXT_PART}]" if takes_images else f"[{TEXT_PART}]"
    out.print(
        f"{IMAGE_LINE if takes_images else ''}"
        f"  curl -s {status.endpoint}/chat/completions -H 'Content-Type: application/json' -d '{{\n"
        f'    "model": "{name}", "messages": [{{"role": "user", "content": {content}}}]}}\'\n',
        markup=False,
        soft_wrap=True,
    )


def _show_host(host: HostStatus) -> None:
    """Print what another machine needs in order to join."""
    if host.key_file is not None and Path(host.key_file).parent != Path(host.join_dir):
        out.print(
            f"\nThis is the host [bold]{host.name}[/]. Another one joins by the same Redis and this key:\n"
        )
        out.print(f"  {host.key_file}\n", markup=False, soft_wrap=True)
        return
    out.print(f"\nThis is the host [bold]{host.name}[/]. For another one copy this folder, and join there:\n")
    out.print(
        f"  scp -pr {host.join_dir} OTHER:join\n  ./triptych up --join ~/join     # on OTHER\n",
        markup=False,
        soft_wrap=True,
    )
    out.print(
        "The folder is for its user alone: with it goes the login of Redis, and the key of the fabric.\n"
    )
    if host.key_file is None:
        out.print("Agents show certificates here: OTHER needs one of its own, of the same authority.\n")


def down() -> int:
    """Stop the system and remove everything that is left of it."""
    layout = lasting_layout(CliSettings())
    if not layout.run_dir.exists():
        out.print("nothing is running")
        return 0
    with out.status(Elapsed("stopping ...")):
        left = daemon.stop_system(layout)
    if left:
        fail(f"not everything could be ended: {', '.join(left)}")
        return 1
    out.print("stopped; no process, socket or shared memory is left")
    return 0


def logs(service: str, follow: bool, num_lines: int) -> int:
    """Print the end of a service's or the supervisor's log; with `follow`, also new lines until Ctrl-C."""
    layout = lasting_layout(CliSettings())
    known = sorted(file.stem for file in layout.logs_dir.glob("*.log"))
    matches = [name for name in known if is_named(name, service)]
    if not matches:
        fail(f"no log of {service}; there are: {', '.join(known) or 'none'}")
        return 1
    file = layout.log_file(matches[0])
    command = ["tail", "-n", str(num_lines), *(["-F"] if follow else []), str(file)]
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        num_earlier = num_lines - _count_lines(file)
        if num_earlier > 0 and older_log(file).exists():  # the log was rotated a moment ago
            subprocess.run(["tail", "-n", str(num_earlier), str(older_log(file))], check=False)
        # `tail` reports each rotation on stderr, as a file that is gone.
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL if follow else None).returncode
    return 0


def _count_lines(file: Path) -> int:
    with file.open("rb") as lines:
        return sum(1 for _ in lines)


def supervise(options: SystemOptions, progress_fd: int) -> int:
    settings = CliSettings()
    layout = lasting_layout(settings)
    log = RotatingLog(layout.log_file(SUPERVISOR), layout.log_max_bytes)  # stderr is its first file
    setup_logging(SUPERVISOR, SUPERVISOR, stream=io.TextIOWrapper(io.BufferedWriter(log)))
    pipe = daemon.StartReportPipe(progress_fd)
    try:
        launch = prepare(options, layout, deployment=settings.deployment)
    except LaunchError as error:
        pipe.send(daemon.StartReport(kind="failed", message=str(error)))
        return 1
    rules = ScalingRules(settings.scale_target_s, settings.scale_cooldown_s)
    return asyncio.run(daemon.supervise(launch, pipe, rules))
