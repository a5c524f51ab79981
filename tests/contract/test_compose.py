"""compose.yaml leaves every service the time that it may take to end."""

import re
from pathlib import Path

from triptych_common.runtime import ServiceSettings

COMPOSE = Path(__file__).resolve().parents[2] / "compose.yaml"


def test_nobody_is_killed_while_it_drains() -> None:
    text = COMPOSE.read_text()
    bound = re.search(r"TRIPTYCH_DRAIN_TIMEOUT_S: \$\{TRIPTYCH_DRAIN_TIMEOUT_S:-(\d+)\}", text)
    grace = re.findall(r"stop_grace_period: \$\{TRIPTYCH_STOP_GRACE:-(\d+)s\}", text)
    assert bound is not None
    assert float(bound[1]) == ServiceSettings.model_fields["drain_timeout_s"].default
    assert len(grace) == 2, "the engines, and the gateway"
    assert all(int(seconds) > float(bound[1]) + 10 for seconds in grace)
