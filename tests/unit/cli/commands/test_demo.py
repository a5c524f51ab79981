"""The images of `demo`, and the variables that it removes from the environment."""

from triptych_cli.commands.demo import demo_environment


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
