"""One of several hosts: names, ports, and what the agent is told."""

from dataclasses import replace
from pathlib import Path

from triptych_cli.system.resolved_options import HostPlan

PLAN = HostPlan("b", "192.0.2.7", 7420, Path("/keys/fabric.key"), None)


def test_what_others_reach_listens_on_consecutive_ports() -> None:
    ports = PLAN.ports(num_gateways=1, num_language_models=3, num_handing_over=2)
    assert ports.gateways == (7421,)
    assert ports.language_models == (7422, 7423, 7424)
    assert ports.kv == (7425, 7426)
    assert ports.all == tuple(range(7421, 7427))


def test_an_agent_without_a_key_has_certificates_of_the_environment() -> None:
    assert PLAN.agent_environment()["TRIPTYCH_FABRIC_KEY_FILE"] == "/keys/fabric.key"
    assert "TRIPTYCH_FABRIC_KEY_FILE" not in replace(PLAN, key_file=None).agent_environment()
