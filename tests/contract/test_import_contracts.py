"""The contracts in pyproject.toml about who may import whom."""

import subprocess

from tests.contract.product_sources import ROOT
from tests.support.check import steps

LIMIT_S = 120.0


def test_packages_import_each_other_as_their_contracts_allow() -> None:
    command = dict(steps())["imports"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
