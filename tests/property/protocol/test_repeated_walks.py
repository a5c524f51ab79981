"""A random order of steps is the same in every process: what fails on one machine fails on another, too.

Sets of texts have another order in each process (`PYTHONHASHSEED`), and sets of objects follow addresses.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.property.protocol.test_protocol_model import CHOICES, GATEWAYS, OVERLAP
from tests.property.protocol.test_stage_model import MIXED
from tests.property.protocol.test_transfer_model import THREE
from tests.support.protocol_world.config import ALL_FAULTS
from tests.support.protocol_world.random_walk import walk

SHARED_ITEM = replace(GATEWAYS, requests=((0, 1), (1, 0), (0,), (1,)))  # of two requests of one gateway
PROGRAM = f"""
import json, logging
logging.disable(logging.CRITICAL)
from {__name__} import paths
from tests.support.protocol_world.transfers.wires import FABRIC_STAND_INS
from tests.support.protocol_world.virtual_loop import virtual_time
with virtual_time(FABRIC_STAND_INS):
    print(json.dumps(paths()))
"""


def paths() -> list[list[str]]:
    """Walks through systems of every kind."""
    systems = [
        replace(each, faults=tuple(sorted(ALL_FAULTS)), max_faults=6)
        for each in (SHARED_ITEM, CHOICES, OVERLAP, MIXED, THREE)
    ]
    return [[" ".join(key) for key in walk(each, seed, 0.06).path] for each in systems for seed in range(3)]


def test_a_walk_takes_the_same_steps_in_another_process() -> None:
    """Run in a process whose seed for hashes differs from this one's."""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONHASHSEED": other},
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    for theirs, ours in zip(json.loads(shown.stdout), paths(), strict=True):
        assert theirs == ours
