"""One file for all services; who overrides whom, and what is refused."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import SecretStr

from triptych_common.runtime import MediaSettings


class GatewaySettings(MediaSettings):
    config_section: ClassVar[str] = "gateway"

    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    api_keys: tuple[SecretStr, ...] = ()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "common: {deployment: from-common, redis_url: 'redis://u:secret@h', otlp_endpoint: 'http://file'}\n"
        "media: {image_formats: [PNG], deployment: from-media}\n"
        "gateway: {port: 9000, allowed_hosts: [a.example, b.example], api_keys: [secret]}\n"
        "cache_store: {region_bytes: 1}\n"
    )
    path.chmod(0o600)
    return path


def load(file: Path, *argv: str) -> GatewaySettings:
    return GatewaySettings.load(["--config", str(file), *argv])


def test_a_service_gets_its_sections_the_own_one_last(file: Path) -> None:
    settings = load(file)
    assert (settings.port, settings.allowed_hosts) == (9000, ("a.example", "b.example"))
    assert (settings.image_formats, settings.deployment) == (("PNG",), "from-media")


def test_the_file_is_found_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CONFIG", str(file))
    assert GatewaySettings.load([]).port == 9000
    assert GatewaySettings().port == 9000


def test_environment_and_command_line_override_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_PORT", "9001")
    monkeypatch.setenv("TRIPTYCH_ALLOWED_HOSTS", '["c.example"]')
    settings = load(file)
    assert (settings.port, settings.allowed_hosts) == (9001, ("c.example",))
    assert load(file, "--port", "9002").port == 9002


@pytest.mark.parametrize("name", ["TRIPTYCH_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_whatever_name_the_environment_has_for_it(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(file).otlp_endpoint == "http://file"
    monkeypatch.setenv(name, "http://environment")
    assert load(file).otlp_endpoint == "http://environment"


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("gateway: {prot: 1}", "gateway has no setting prot"),
        ("media: {port: 1}", "media has no setting port"),
        ("gateway: {config: x}", "gateway has no setting config"),
        ("gateways: {}", "may have these sections"),
        ("[1]", "may have these sections"),
        ("gateway: [1]", "gateway must hold names and values"),
        ("gateway: {1: 2}", "gateway must hold names and values"),
        ("gateway: {port: 1\n", "is not valid YAML (line 2)"),
        ("gateway: !!python/object/apply:os.system [exit]", "is not valid YAML (line 1)"),
        ("\x00", "is not valid YAML"),
        ("gateway: {port: 2024-13-45}", "is not valid YAML"),
        ("gateway: {port: !!bool maybe}", "is not valid YAML"),
        ("gateway: {port: secret}", "port: Input should be a valid integer"),
    ],
)
def test_what_is_refused(content: str, fault: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(content)
    with pytest.raises(SystemExit) as caught:
        load(file)
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert fault in stderr
    assert "secret" not in stderr


def test_a_file_that_others_can_write_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.chmod(0o666)
    with pytest.raises(SystemExit):
        load(file)
    assert "can be written by other users" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(tmp_path / "none.yaml")
    assert "cannot be read: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "gateway:\n", "# nothing\n"])
def test_an_empty_file_says_nothing(content: str, file: Path) -> None:
    file.write_text(content)
    assert load(file).port == 8000


def test_what_counts_is_shown_with_its_origin_and_without_secrets(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIPTYCH_LOG_LEVEL", "debug")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret@environment")
    with pytest.raises(SystemExit) as caught:
        load(file, "--port", "9002", "--print-config")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "port = 9002  # command line" in lines
    assert 'log_level = "DEBUG"  # environment' in lines
    assert 'otlp_endpoint = "http://***@environment"  # environment' in lines
    assert f'allowed_hosts = ["a.example","b.example"]  # {file}' in lines
    assert "drain_timeout_s = 15.0  # default" in lines
    assert f"redis_url = (hidden)  # {file}" in lines
    assert f"api_keys = (hidden)  # {file}" in lines
    assert "secret" not in shown
    assert len(lines) == len(GatewaySettings.model_fields)
    assert not (tmp_path / "run").exists()
