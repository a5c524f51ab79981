"""Settings of a listener for scrapes: part of a service's own section in a file of settings, of no other."""

from pathlib import Path
from typing import ClassVar

import pytest

from triptych_common.runtime import MetricsSettings, ServiceSettings


class ScrapedSettings(ServiceSettings, MetricsSettings):
    config_section: ClassVar[str] = "encoder"


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    path.chmod(0o600)
    return f"--config={path}"


def test_one_port_for_all_services_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ScrapedSettings.load([written(tmp_path, "common: {metrics_port: 9464}\n")])
    assert "common has no setting metrics_port" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "65536", "x"])
def test_a_port_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(SystemExit):
        ScrapedSettings.load([f"--metrics-port={value}"])
