"""`run_service` in a process of its own: signals and exit codes."""

import signal
import subprocess
import sys
import textwrap

import pytest

READY = "ready\n"


def start(body: str) -> subprocess.Popen[str]:
    program = (
        textwrap.dedent(
            """
        import asyncio, sys
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
