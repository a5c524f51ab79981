"""`run_service` in a process of its own: signals and exit codes."""

import signal
import subprocess
import sys
import textwrap

import pytest

READY = "ready\n"


def start(body: str, end_limit_s: float = 60.0) -> subprocess.Popen[str]:
    program = (
        textwrap.dedent(
            f"""
        import asyncio, sys, threading
        from triptych_common.runtime import service
        service.END_LIMIT_S = {end_limit_s}
        from triptych_common.domain.errors import BusUnavailableError
        from triptych_common.runtime import StopSignal, run_service
        def report(text):
            sys.stdout.write(text + "\\n"); sys.stdout.flush()
        async def main(stop: StopSignal) -> None:
        """
        )
        + textwrap.indent(textwrap.dedent(body), "    ")
        + "\nrun_service(main)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signal_drains_and_exits_0(sent: signal.Signals) -> None:
    with start(
        "report('ready'); await stop.wait(); report(f'drained {stop.reason} {stop.is_set}')"
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == READY
        process.send_signal(sent)
        out, err = process.communicate(timeout=20)
        assert (out, process.returncode, err) == (f"drained {sent.name} True\n", 0, "")


def test_second_signal_ends_at_once() -> None:
    body = "report('ready'); await stop.wait(); report('draining'); await asyncio.sleep(60)"
    with start(body) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize(
    ("body", "returncode", "text"),
    [
        ("return", 0, ""),
        ("raise BusUnavailableError('no redis')", 1, "service failed"),
        ("raise ValueError('bug')", 1, "ValueError: bug"),
    ],
)
def test_exit_codes(body: str, returncode: int, text: str) -> None:
    with start(body) as process:
        _, err = process.communicate(timeout=20)
        assert process.returncode == returncode
        assert text in err


HELD_UP = """
from triptych_common.telemetry import setup_logging
setup_logging("encoder", "encoder-0", "info")
async def fail():
    raise BusUnavailableError('the engine hangs')
async with asyncio.TaskGroup() as group:
    group.create_task(stop.watch(fail))
    try:
        await stop.wait()
    finally:
        threading.Event().wait()
"""


def test_a_failure_is_told_and_ends_the_process_though_its_end_is_held_up() -> None:
    with start(HELD_UP, end_limit_s=0.5) as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
        assert err.index("the engine hangs") < err.index("Timeout (")
        assert "in main" in err  # where it hung


def test_work_that_is_cancelled_before_its_first_step_leaves_nothing_unawaited() -> None:
    body = """
    async def work():
        report("begun")
    task = asyncio.create_task(stop.watch(work))
    task.cancel()
    await asyncio.wait([task])
    """
    with start(body) as process:
        assert process.communicate(timeout=60) == ("", "")
        assert process.returncode == 0
