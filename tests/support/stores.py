"""A cache_store as a child process, its core alone, and a log of pushes; for tests and benchmarks."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.process_ends import end_process
from triptych_cache_store.core.recovery import IsIntact, recover, trust
from triptych_cache_store.core.state import StoreIdentity
from triptych_cache_store.core.store_core import StoreCore
from triptych_cache_store.entries.leases import SessionId
from triptych_cache_store.entries.space import Limits
from triptych_cache_store.service import make_state
from triptych_common.domain.errors import StoreError, StoreUnavailableError
from triptych_common.protocol.store import SlabInfo, StatsQuery, StoreStats
from triptych_common.region.layout import RegionLayout
from triptych_common.store_session import Push, StoreSession

START_TIMEOUT_S = 20.0
RETRY_S = 0.02


def core_on(
    region: bytearray,
    layout: RegionLayout,
    *,
    generation: int = 1,
    limits: Limits | None = None,
    is_alive: Callable[[int], bool] = lambda slot: False,
    is_connected: Callable[[SessionId], bool] = lambda session_id: True,
    now: float = 0.0,
    slab: SlabInfo | None = None,
    is_intact: IsIntact = trust,
) -> StoreCore:
    """Store core on any buffer that has room for the headers, restored from its content."""
    identity = StoreIdentity("store-0", "/nowhere", "region", generation, layout)
    state = make_state(memoryview(region), identity, limits or Limits(), slab)
    recover(state, is_alive=is_alive, namespace=None, now=now, is_intact=is_intact)
    return StoreCore(state, is_connected=is_connected, is_alive=is_alive)


def stats_of(socket: Path) -> StoreStats:
    """Statistics of a store, read through a session that counts itself."""
    with closing(StoreSession.connect(socket, f"test-{time.monotonic_ns()}/stats")) as session:
        stats = session.request(StatsQuery(seq=0))
    if not isinstance(stats, StoreStats):
        raise StoreError("internal", f"{stats.TYPE} is no answer to a stats query")
    return stats


class StoreProcess:
    """One daemon with its own run directory, which can be stopped, killed and restarted."""

    def __init__(
        self, run_dir: Path, *options: str, region_bytes: int = 32 << 20, block_bytes: int = 64 << 10
    ) -> None:
        self.run_dir = run_dir
        self.block_bytes = block_bytes
        self._arguments = (
            f"--run-dir={run_dir}",
            f"--region-bytes={region_bytes}",
            f"--block-bytes={block_bytes}",
            *options,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[StoreSession] = []

    @property
    def socket(self) -> Path:
        return self.run_dir / "store.sock"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the store was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the daemon and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not come up in time; with its log.
        """
        with (self.run_dir / "log").open("ab") as log:
            command = [sys.executable, "-W", "error", "-m", "triptych_cache_store", *self._arguments]
            self._process = subprocess.Popen(command, stderr=log, stdin=subprocess.DEVNULL)
        pause = threading.Event()
        for _ in range(int(START_TIMEOUT_S / RETRY_S)):
            try:
                StoreSession.connect(self.socket, "probe").close()
                return
            except StoreUnavailableError:
                if self._process.poll() is not None:
                    break
                pause.wait(RETRY_S)
        raise RuntimeError(f"the store did not come up: {self.log()}")

    def stop(self, with_signal: signal.Signals = signal.SIGTERM) -> int:
        """Send the signal, wait, and return the exit status; repeated calls return the same status."""
        if self._process is None:
            raise RuntimeError("the store was not started")
        return end_process(self._process, with_signal)

    def connect(self, client_name: str, **options: Any) -> StoreSession:
        """New session with the daemon; `close` ends it."""
        session = StoreSession.connect(self.socket, client_name, **options)
        self._sessions.append(session)
        return session

    def stats(self) -> StoreStats:
        return stats_of(self.socket)

    def log(self) -> str:
        return (self.run_dir / "log").read_text()

    def close(self) -> None:
        """End the sessions and the process."""
        for session in self._sessions:
            session.close()
        if self._process is not None:
            self.stop()


class PushLog:
    """Collects a session's pushes (pass it as `on_push`) and waits for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._pushes: list[Push] = []

    def __call__(self, push: Push) -> None:
        with self._condition:
            self._pushes.append(push)
            self._condition.notify_all()

    def wait_next(self, timeout_s: float = 5.0) -> Push:
        """Wait for and take the oldest push.

        Raises:
            TimeoutError: none came.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: bool(self._pushes), timeout_s):
                raise TimeoutError("no push came")
            return self._pushes.pop(0)

    @property
    def is_empty(self) -> bool:
        return not self._pushes
