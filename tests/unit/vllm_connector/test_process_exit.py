"""Signals to a host's process group, and the host's death, as an engine's processes get them."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys, time
    from triptych_vllm_connector.process_exit import leave_signals_to_host

    def report(*words):
        os.write(1, (" ".join(map(str, words)) + "\\n").encode())

    def engine():
        leave_signals_to_host()
        leave_signals_to_host()
        signal.signal(signal.SIGINT, lambda *_: report("engine got SIGINT"))
        def on_term(*_):
            report("engine got the end signal")
            os._exit(0)
        signal.signal(signal.SIGTERM, on_term)
        report("engine", os.getpid(), os.getpgrp(), os.getsid(0))
        while True:
            signal.pause()

    if __name__ == "__main__":
        leave_signals_to_host()  # changes nothing in the host itself
        signal.signal(signal.SIGINT, lambda *_: report("host got SIGINT"))
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=engine, daemon=True)
        process.start()
        report("host", os.getpid(), os.getpgrp(), os.getsid(0))
        while True:
            signal.pause()
    """
)


def test_an_engine_gets_signals_of_its_host_alone(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as host:
        assert host.stdout is not None
        try:
            _, pid, group, session = host.stdout.readline().split()
            assert (int(pid), int(group), int(session)) == (host.pid, host.pid, host.pid)
            _, engine, engine_group, engine_session = host.stdout.readline().split()
            assert engine == engine_group != group
            assert engine_session == session  # where the supervisor looks for it

            os.killpg(host.pid, signal.SIGINT)  # a terminal's Ctrl-C
            assert host.stdout.readline() == "host got SIGINT\n"
            host.kill()
            assert host.stdout.readline() == "engine got the end signal\n"
            assert host.stdout.read() == ""
        finally:
            host.kill()


ORPHAN = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys
    from triptych_vllm_connector.process_exit import leave_signals_to_host

    def engine():
        os.write(1, b"up\\n")
        host = multiprocessing.parent_process()
        host.join()  # it dies before a process has asked the kernel for the signal
        while os.getppid() == host.pid:
            os.sched_yield()
        signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"engine got the end signal\\n"))
        leave_signals_to_host()

    if __name__ == "__main__":
        multiprocessing.get_context("spawn").Process(target=engine, daemon=True).start()
        signal.pause()
    """
)


def test_an_engine_whose_host_is_dead_already_ends(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(ORPHAN)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        host.kill()
        assert host.stdout.readline() == "engine got the end signal\n"
