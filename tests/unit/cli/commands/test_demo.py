"""The images of `demo`, and the variables that it removes from the environment."""

from pathlib import Path

from triptych_cli.commands.demo import demo_environment, load_samples


def test_longer_samples_are_shown_first(tmp_path: Path) -> None:
    (tmp_path / "samples.json").write_text(
        '[{"file": "a.png", "digits": "1"}, {"file": "b.png", "digits": "1 2 3"}]'
    )
    assert [sample.digits for sample in load_samples(tmp_path, 2)] == ["1 2 3", "1"]


def test_spans_stay_in_files_and_no_key_is_asked_for() -> None:
    caller = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "OTEL_SDK_DISABLED": "true",
        "TRIPTYCH_OTLP_ENDPOINT": "http://collector:4318",
        "triptych_api_keys": '["k"]',
        "TRIPTYCH_LOG_LEVEL": "DEBUG",
        "PATH": "/bin",
    }
    assert demo_environment(caller) == {"TRIPTYCH_LOG_LEVEL": "DEBUG", "PATH": "/bin"}
