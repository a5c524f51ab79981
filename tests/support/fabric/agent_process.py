"""A fabric agent as a child process, and its key; for tests and benchmarks."""

import asyncio
import secrets
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.process_ends import end_process
from tests.support.stores import START_TIMEOUT_S
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry

AGENT_RETRY_S = 0.1


class FabricProcess:
    """Fabric agent as a child process beside the store of `run_dir`; it can be stopped and restarted.

    Its log is RUN_DIR/fabric.log. `options` override the others.
    """

    def __init__(
        self, run_dir: Path, redis_url: str, instance: str, *options: str, port: int, deployment: str = "test"
    ) -> None:
        self.run_dir = run_dir
        self.instance = instance
        self._arguments = (
            f"--run-dir={run_dir}",
            f"--redis-url={redis_url}",
            f"--deployment={deployment}",
            f"--instance={instance}",
            f"--fabric-port={port}",
            *options,
        )
        self._redis_url = redis_url
        self._deployment = deployment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the agent and wait until it is registered.

        Raises:
            RuntimeError: it ended, or did not come up in time; with its log.
        """
        before = self._boot_id()
        with (self.run_dir / "fabric.log").open("ab") as log:
            command = [sys.executable, "-W", "error", "-m", "triptych_fabric", *self._arguments]
            self.process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        pause = threading.Event()
        for _ in range(int(START_TIMEOUT_S / AGENT_RETRY_S)):
            if self._boot_id() not in (None, before):
                return
            if self.process.poll() is not None:
                break
            pause.wait(AGENT_RETRY_S)
        raise RuntimeError(f"the fabric agent did not come up: {self.log()}")

    def send_signal(self, number: signal.Signals) -> None:
        self._running().send_signal(number)

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait, and return the exit status; repeated calls return the same status."""
        return end_process(self._running(), with_signal)

    def log(self) -> str:
        return (self.run_dir / "fabric.log").read_text()

    def close(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.stop()

    def _boot_id(self) -> str | None:
        """Boot id of the registered agent; runs its own event loop in a thread."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self._registered_boot_id()).result()

    async def _registered_boot_id(self) -> str | None:
        bus = AsyncBus(self._redis_url, self._deployment, client_name=f"{self.instance}/probe")
        async with bus:
            for record in await Registry(bus).list_instances():
                if record.instance == self.instance:
                    return record.boot_id
        return None

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("the fabric agent was not started")
        return self.process


def write_fabric_key(path: Path) -> Path:
    """Write a fabric key for a test's agents, mode 0600 as they require."""
    path.touch(mode=0o600)
    path.write_bytes(secrets.token_hex(32).encode())
    return path
