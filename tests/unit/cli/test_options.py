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


def asked_of_up(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> SystemOptions:
    given: list[SystemOptions] = []
    monkeypatch.setattr(lifecycle, "up", lambda options, join: given.append(options) or 0)
    result = CliRunner().invoke(app, ["up", *arguments])
    assert result.exit_code == 0, result.output
    return given[0]


@pytest.mark.parametrize(
    ("text", "low", "high"), [("0..3", 0, 3), ("2", None, 2), ("2..2", None, 2), ("0", None, 0)]
)
def test_a_number_of_engines_may_be_a_range(
    text: str, low: int | None, high: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = asked_of_up(monkeypatch, "--encoders", text, "--prefill-decodes", text)
    assert (options.min_encoders, options.encoders) == (low, high)
    assert (options.min_prefill_decodes, options.prefill_decodes) == (low, high)
    assert SystemOptions.of_daemon(options.argument(), None) == options


@pytest.mark.parametrize("text", ["3..1", "x", "-1"])
def test_other_numbers_are_refused(text: str) -> None:
    assert CliRunner().invoke(app, ["up", f"--encoders={text}"]).exit_code == 2
