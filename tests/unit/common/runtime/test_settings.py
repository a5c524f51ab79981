import os
from pathlib import Path

import pytest

from triptych_common.runtime import RunDirError, ServiceSettings, ensure_run_dir


class EncoderSettings(ServiceSettings):
    num_slots: int = 2
    fail_fast: bool = False


def test_defaults_follow_the_run_dir(tmp_path: Path) -> None:
    settings = EncoderSettings.load([])
    assert settings.run_dir == tmp_path / "run"
    assert settings.store_socket == tmp_path / "run" / "store.sock"
    assert settings.traces_dir == tmp_path / "run" / "traces"
    assert settings.names.encode_jobs("d") == "triptych:default:encode-jobs:{d}:store-0"
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_command_line_wins_over_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_INSTANCE", "from-env")
    monkeypatch.setenv("TRIPTYCH_NUM_SLOTS", "7")
    settings = EncoderSettings.load(["--instance", "from-cli", "--log-level", "debug", "--fail-fast"])
    assert (settings.instance, settings.num_slots, settings.log_level) == ("from-cli", 7, "DEBUG")
    assert settings.fail_fast


def test_replicas_with_one_environment_get_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_INSTANCE", "encoder-{hostname}")
    for hostname in ("4be1", "77a0"):
        monkeypatch.setattr("socket.gethostname", lambda hostname=hostname: hostname)
        assert EncoderSettings.load([]).instance == f"encoder-{hostname}"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--redis-url", "http://x:secret@y"], "redis_url: Value error, must start with redis://"),
        (["--deployment", "a:b"], "deployment"),
        (["--log-level", "loud"], "log_level"),
        (["--num-slots", "many"], "num_slots"),
        (["--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--no-such-flag", "1"], "unrecognized arguments"),
    ],
)
def test_invalid_settings_end_with_2_and_a_reason(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        EncoderSettings.load(argv)
    assert caught.value.code == 2
    stderr = capsys.readouterr().err
    assert text in stderr
    assert "secret" not in stderr
    assert "default factory" not in stderr


def test_password_is_not_shown() -> None:
    assert "secret" not in repr(EncoderSettings.load(["--redis-url", "redis://u:secret@h"]))


class TestRunDir:
    def test_open_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir(mode=0o700)
        (tmp_path / "open").chmod(0o750)
        with pytest.raises(RunDirError, match="open to other users"):
            ensure_run_dir(tmp_path / "open")

    def test_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "link").symlink_to(tmp_path / "real")
        with pytest.raises(RunDirError, match="not a directory"):
            ensure_run_dir(tmp_path / "link")

    def test_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(RunDirError):
            ensure_run_dir(tmp_path / "file")

    def test_foreign_directory_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "theirs").mkdir(mode=0o700)
        monkeypatch.setattr(os, "getuid", lambda: 424242)
        with pytest.raises(RunDirError, match="belongs to user"):
            ensure_run_dir(tmp_path / "theirs")

    def test_load_refuses_it_too(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "run").mkdir(mode=0o700)
        (tmp_path / "run").chmod(0o777)
        with pytest.raises(SystemExit) as caught:
            EncoderSettings.load([])
        assert caught.value.code == 2
        assert "chmod 700" in capsys.readouterr().err
