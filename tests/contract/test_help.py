"""Every setting and every option of the launcher has a help text, and all of it is shown."""

import re
from collections.abc import Iterator

import click
import pytest
import typer
from typer.testing import CliRunner

from triptych_cache_store.settings import StoreSettings
from triptych_cli.app import app
from triptych_common.runtime import ServiceSettings
from triptych_encoder.settings import EncoderSettings
from triptych_fabric.settings import FabricSettings
from triptych_gateway.settings import GatewaySettings
from triptych_prefill_decode.settings import PrefillDecodeSettings

SERVICES = (GatewaySettings, EncoderSettings, PrefillDecodeSettings, StoreSettings, FabricSettings)
WIDE = "1000"  # columns: no text is broken over lines


def commands(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            yield from commands(each, *path, name)


COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("cls", SERVICES, ids=lambda cls: cls.__name__)
def test_help_of_a_service_explains_every_setting_in_a_sentence(
    cls: type[ServiceSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", WIDE)
    with pytest.raises(SystemExit):
        cls.load(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name, field in cls.model_fields.items():
        text = " ".join((field.description or "").split())
        assert len(text.split()) >= 4, f"{name}: {text!r}"
        assert re.match(r"[A-Z`].*\.$", text), f"{name}: {text!r} is no sentence"
        assert text in shown, name


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_help_of_the_launcher_shows_every_text(path: tuple[str, ...], command: click.Command) -> None:
    """Rich takes `[default: ...]` within a help text for markup, and shows nothing."""
    output = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": WIDE}).output
    shown = " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())
    for parameter in command.params:
        text = getattr(parameter, "help", None)
        assert text, parameter.name
        assert " ".join(text.split()) in shown, f"{parameter.name}: {text!r}"
        if isinstance(default := getattr(parameter, "show_default", None), str):
            assert default in shown, f"{parameter.name}: {default!r}"
