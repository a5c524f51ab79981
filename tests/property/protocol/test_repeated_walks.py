"""A random order of steps is the same in every process: what fails on one machine fails on another, too.

Sets of texts have another order in each process (`PYTHONHASHSEED`), and sets of objects follow addresses.
"""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from tests.property.protocol.test_protocol_model import GATEWAYS, OVERLAP
from tests.property.protocol.test_stage_model import MIXED
from tests.property.protocol.test_transfer_model import THREE
from tests.support.protocol_world.config import ALL_FAULTS, Config
from tests.support.protocol_world.random_walk import walk
from tests.support.protocol_world.transfers.wires import FABRIC_STAND_INS
from tests.support.protocol_world.virtual_loop import virtual_time

ROOT = Path(__file__).parents[3]
MODULE = "tests.property.protocol.test_repeated_walks"
SEEDS = range(3)
SYSTEMS: tuple[Config, ...] = tuple(
    replace(config, faults=tuple(sorted(ALL_FAULTS)), max_faults=6)
    for config in (
        replace(GATEWAYS, requests=((0, 1), (1, 0), (0,), (1,))),  # two requests of a gateway share an item
        OVERLAP,
        MIXED,
        THREE,
    )
)


def paths() -> list[list[str]]:
    """Of walks through all systems."""
    return [
        [" ".join(key) for key in walk(config, seed, fault_share=0.06).path]
        for config in SYSTEMS
        for seed in SEEDS
    ]


def show_paths() -> None:
    """On stdout, for another process."""
    logging.disable(logging.CRITICAL)
    with virtual_time(FABRIC_STAND_INS):
        json.dump(paths(), sys.stdout)


def test_a_walk_takes_the_same_steps_in_another_process() -> None:
    """With another seed for hashes than ours, whatever that is."""
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    shown = subprocess.run(
        [sys.executable, "-c", f"from {MODULE} import show_paths; show_paths()"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": other},
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    for theirs, ours in zip(json.loads(shown.stdout), paths(), strict=True):
        assert theirs == ours
