"""The Redis URL can hold a password: it is passed on by the environment, never as an argument."""

import pytest
from typer.testing import CliRunner

from triptych_cli.app import app
from triptych_cli.commands import lifecycle
from triptych_cli.options import SystemOptions

SECRET = "redis://:secret@there/0"


def options(redis_url: str | None) -> SystemOptions:
    return SystemOptions("m", 1, 1, redis_url, 8000, None, "", "")


def test_the_daemons_arguments_hold_no_password() -> None:
    assert "secret" not in options(SECRET).argument()


@pytest.mark.parametrize("redis_url", [SECRET, None])
def test_the_daemon_gets_what_up_was_given(redis_url: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[SystemOptions] = []
    monkeypatch.setattr(lifecycle, "supervise", lambda options, fd: given.append(options) or 0)
    asked = options(redis_url)
    CliRunner().invoke(app, ["supervise", "--progress-fd=9", asked.argument()], env=asked.environment())
    assert given == [asked]
