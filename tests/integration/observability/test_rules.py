"""Prometheus' own tool reads the configuration and the rules, and makes each alert fire on given series."""

import subprocess

import pytest

from tests.support.observability import CONFIG, PROMETHEUS, RULE_TESTS, RULES
from tests.support.prometheus import Binaries

LIMIT_S = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", CONFIG.name),
        ("check", "config", "prometheus.epd.yml"),
        ("check", "rules", RULES.name),
        ("test", "rules", RULE_TESTS.name),
    ],
    ids=["config", "config with prefill and decode", "rules", "tests of rules"],
)
def test_promtool_accepts(binaries: Binaries, arguments: tuple[str, ...]) -> None:
    command = [str(binaries.promtool), *arguments]
    done = subprocess.run(
        command, cwd=PROMETHEUS, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "FAILED" not in done.stdout + done.stderr
