"""The image of Prometheus that compose.yaml names; where it cannot be had, one with Debian's Prometheus."""

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.integration.compose.project import ROOT, docker
from tests.support.prometheus import require_binaries

PULL_LIMIT_S = 300.0
STAND_IN = "triptych-test-prometheus"
DOCKERFILE = """\
FROM python:3.11-slim-bookworm
COPY prometheus /bin/prometheus
RUN mkdir /prometheus && chown 65534:65534 /prometheus
USER 65534:65534
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
"""


def files_with_prometheus(folder: Path) -> tuple[str, ...]:
    """Options of `docker compose`: with a file in `folder` that names the stand-in, where that is needed."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    if _is_there(services["prometheus"]["image"]):
        return ()
    _build_stand_in()
    override = folder / "prometheus.yaml"
    service = {"image": STAND_IN, "pull_policy": "never"}
    override.write_text(yaml.safe_dump({"services": {"prometheus": service}}))
    return ("--file", str(ROOT / "compose.yaml"), "--file", str(override))


def _is_there(image: str) -> bool:
    """Also after a pull."""
    for arguments in (("image", "inspect", image), ("pull", "--quiet", image)):
        try:
            docker(*arguments, limit_s=PULL_LIMIT_S)
        except subprocess.SubprocessError:
            continue
        return True
    return False


def _build_stand_in() -> None:
    binary = require_binaries().prometheus
    command = ["docker", "build", "--quiet", "--tag", STAND_IN, "--file", "-", str(binary.parent)]
    done = subprocess.run(
        command, input=DOCKERFILE, capture_output=True, text=True, timeout=PULL_LIMIT_S, check=False
    )
    if done.returncode:
        pytest.skip(f"no image of Prometheus: {done.stderr[-500:]}")
