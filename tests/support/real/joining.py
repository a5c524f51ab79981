"""Engines that join a running system, each started by hand as in docs/reference/configuration.md.

And a system that has no others: Redis and a cache_store, without the supervisor of `./triptych up`, which
would start again whatever is ended.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import embedded_redis
from tests.support.real.inspection import redis_url
from tests.support.real.system import EXACT, SMALL_DUMMIES, START_TIMEOUT_S, STOP_TIMEOUT_S, System
from tests.support.real.warm import client as warm
from tests.support.real.warm.preload import ENVIRONMENT
from tests.support.waiting import wait_until
from triptych_common.bus import AsyncBus
from triptych_common.coordination import Registry
from triptych_common.domain.errors import StoreError
from triptych_common.protocol.messages import InstanceRecord, Role

DEPLOYMENT = "default"
STORE_START_S = 60


@dataclass(frozen=True)
class JoinedEngine:
    """One that was started, and may have ended."""

    name: str
    process: "warm.ForkedProcess | subprocess.Popen[bytes]"
    log: Path

    def end(self) -> int:
        """SIGTERM, as an operator ends it; its exit code when it has drained."""
        self.process.terminate()
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self) -> None:
        """It, and what is left of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def joined_engines(
    system: System, roles: Mapping[str, Role], model: Path, **env: str
) -> Iterator[dict[str, JoinedEngine]]:
    """Engines of `model`, by name, which are registered; ended with the block, those that still run.

    Forked from a process that has imported vLLM, as `running_system` does it; encoders try small items.

    Args:
        roles: by name.
        env: further settings of all of them.
    """
    joined = {}
    try:
        for name, role in roles.items():
            joined[name] = _start(system, name, role, model, env)
        wait_until(lambda: _are_registered(system, joined), START_TIMEOUT_S, f"{set(joined)} are registered")
        yield joined
        running = [each for each in joined.values() if each.process.poll() is None]
        codes = {each.name: each.end() for each in running}
        assert not any(codes.values()), codes
    finally:
        for each in joined.values():
            each.kill()


def records_of(system: System) -> dict[str, InstanceRecord]:
    """All that is registered, by name."""

    async def read() -> list[InstanceRecord]:
        async with await AsyncBus.connect(redis_url(system), DEPLOYMENT, client_name="test") as bus:
            return await Registry(bus).list_instances()

    return {record.instance: record for record in asyncio.run(read())}


@contextmanager
def system_without_engines() -> Iterator[System]:
    """Redis and a cache_store. It has no gateway, and so no `base_url`: `another_gateway` gives it one."""
    shared_memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    run_dir = Path(tempfile.mkdtemp(prefix="triptych-t-", dir=shared_memory))
    state_dir = Path(tempfile.mkdtemp(prefix="triptych-state-"))
    places = {"TRIPTYCH_RUN_DIR": str(run_dir), "TRIPTYCH_STATE_DIR": str(state_dir)}
    system = System("", run_dir=run_dir, state_dir=state_dir, env={**os.environ, **places})
    system.logs_dir.mkdir(parents=True)
    try:
        with embedded_redis() as server:
            (run_dir / "redis.sock").symlink_to(server.socket_path)
            with _store(system):
                yield system
    finally:
        left = [path.name for path in run_dir.glob("region*")]
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(state_dir, ignore_errors=True)
    assert not left, left


@contextmanager
def _store(system: System) -> Iterator[None]:
    command = [sys.executable, "-m", "triptych_cache_store", f"--region-bytes={64 << 20}"]
    with (system.logs_dir / "cache_store-0.log").open("wb") as output:
        process = subprocess.Popen(command, env=_environment(system), stdout=output, stderr=output)
        try:
            wait_until(lambda: _answers(system), STORE_START_S, "the store answers")
            yield
            process.terminate()
            assert process.wait(STOP_TIMEOUT_S) == 0
        finally:
            process.kill()


def _answers(system: System) -> bool:
    try:
        system.store_stats()
    except StoreError:
        return False
    return True


def _start(system: System, name: str, role: Role, model: Path, env: Mapping[str, str]) -> JoinedEngine:
    options: Sequence[str] = EXACT
    own = {"TRIPTYCH_MODEL": str(model), "TRIPTYCH_INSTANCE": name}
    package = "triptych_encoder"
    if role is Role.ENCODE:
        options = (*EXACT, "--limit-mm-per-prompt", json.dumps(SMALL_DUMMIES))
    else:
        package = "triptych_prefill_decode"
        own |= {"TRIPTYCH_ROLE": role.value, "TRIPTYCH_PORT": "0"}
    environment = {
        **ENVIRONMENT, **_environment(system), **own, "TRIPTYCH_ENGINE_ARGS": json.dumps(options), **env
    }  # fmt: skip
    log = system.logs_dir / f"{name}.log"
    with log.open("wb") as output:
        process = warm.start([sys.executable, "-m", package], environment=environment, output=output)
    return JoinedEngine(name, process, log)


def _environment(system: System) -> dict[str, str]:
    """The same Redis, the same store, the same folder of traces."""
    places = {"TRIPTYCH_REDIS_URL": redis_url(system), "TRIPTYCH_TRACES_DIR": str(system.traces_dir)}
    return {**system.env, **places, "TMPDIR": str(system.run_dir)}


def _are_registered(system: System, joined: Mapping[str, JoinedEngine]) -> bool:
    for each in joined.values():
        if each.process.poll() is not None:
            raise RuntimeError(f"{each.name} ended:\n{each.log.read_text(errors='replace')[-3000:]}")
    return joined.keys() <= records_of(system).keys()
