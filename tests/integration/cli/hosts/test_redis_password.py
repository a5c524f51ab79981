"""The password of the embedded Redis, as a real redis-server reads it from its file of settings."""

import subprocess
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError

from tests.conftest import redis_server_binary
from tests.support.waiting import wait_until
from triptych_cli.system.shared_secrets import redis_config, socket_url, write_private


@pytest.mark.parametrize("password", ["f00d", "two words", "a\"b\\c'd", "line\nport 1", "# ü"])
def test_it_is_what_was_written(run_dir: Path, password: str) -> None:
    config, socket = run_dir / "redis.conf", run_dir / "redis.sock"
    write_private(config, redis_config(password))
    command = [redis_server_binary(), str(config), "--port", "0", "--unixsocket", str(socket)]
    server = subprocess.Popen([*command, "--save", ""], cwd=run_dir, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_there(socket), 30.0, "redis-server listens")
        with closing(Redis.from_url(socket_url(socket, password))) as client:
            assert client.ping()
        stranger = Redis.from_url(socket_url(socket, "another"))
        with closing(stranger), pytest.raises(AuthenticationError):
            stranger.ping()
    finally:
        server.kill()
        server.wait(timeout=10)


def is_there(socket: Path) -> bool:
    """It answers, though it does not let in."""
    with closing(Redis.from_url(socket_url(socket, None))) as client:
        try:
            client.ping()
        except AuthenticationError:
            return True
        except RedisError:
            pass
    return False
