"""Requests in two stages among real parts: no wrong token, no hang, no KV block kept, bounded attempts.

The gateway's `Forwarder` with all behind it, the `Consumer` of an instance that prefills, and the refusals
and leases of one that decodes are the real ones (see `tests.support.protocol_world.stages`). Orders as in
`test_protocol_model`.
"""

from dataclasses import replace

import pytest

from tests.property.protocol.test_protocol_model import USUAL, explore
from tests.support.protocol_steps import STAGE_STEPS
from tests.support.protocol_world.config import FAULTS, STAGE_FAULTS, Config
from tests.support.protocol_world.explore import Bounds
from tests.support.protocol_world.random_walk import RareWalk, of_faults, take_every_kind, walk

ALL_FAULTS = (*FAULTS, *STAGE_FAULTS)
STAGED_FAULTS = (*STAGE_FAULTS, "cancel", "hurry", "crash_consumer")
ONE = Config(requests=((0,),), rows=(2,), num_consumers=0, num_prefills=1, num_decodes=1)
PAIRS = replace(ONE, requests=((0,), (1,)), rows=(2, 2), num_decodes=2)  # what is freed is soon the other's
TURNS = replace(PAIRS, requests=((0,), (0,), (1,)), follows=(-1, 0, -1))
MIXED = replace(
    PAIRS, requests=((0, 1), (1,), (0,)), num_consumers=1, num_prefills=2, num_encoders=2, num_gateways=2
)
SMALL = replace(
    PAIRS, requests=((0, 1), (1, 0), (2,)), rows=(2, 2, 2), budget=12, overlap=True, num_kv_blocks=22
)  # a KV cache that is kept leaves room for one prompt more
SYSTEMS = {"pairs": PAIRS, "turns": TURNS, "mixed": MIXED, "small": SMALL}

QUICK: dict[str, tuple[Config, Bounds]] = {
    "1x1, 1 deviation": (replace(ONE, is_coarse=True), Bounds(max_deviations=1)),
    "1x1, usual order, 1 fault of the stages": (
        replace(ONE, is_coarse=True, faults=STAGED_FAULTS, max_faults=1),
        USUAL,
    ),
    "2x2, 1 deviation": (replace(PAIRS, is_coarse=True), Bounds(max_deviations=1)),
    "turns, 1 deviation": (replace(TURNS, is_coarse=True), Bounds(max_deviations=1)),
}
LONG: dict[str, tuple[Config, Bounds]] = {
    "1x1, all coarse orders": (replace(ONE, is_coarse=True), Bounds()),
    "1x1, usual order, 1 fault": (replace(ONE, is_coarse=True, faults=ALL_FAULTS, max_faults=1), USUAL),
    "2x2, usual order, 1 fault of the stages": (
        replace(PAIRS, is_coarse=True, faults=STAGED_FAULTS, max_faults=1),
        USUAL,
    ),
    "2x2, 2 deviations": (replace(PAIRS, is_coarse=True), Bounds(max_deviations=2)),
}

NUM_WALKS = 12  # of each system
RARE = (
    RareWalk(replace(TURNS, faults=("forget_prefix",), max_faults=9), 0.5),
    RareWalk(replace(TURNS, faults=("lose_read",), max_faults=9), 0.5),
    RareWalk(replace(PAIRS, faults=("repeat_decode",), max_faults=9), 0.5),
    RareWalk(
        replace(PAIRS, requests=((0,), (1,)) * 3, faults=("crash_decode", "cancel"), max_faults=6), 0.03
    ),
    RareWalk(
        replace(PAIRS, requests=((0,), (1,)) * 3, num_decodes=1, faults=("drain_decode",), max_faults=9), 0.05
    ),
    RareWalk(replace(PAIRS, faults=("lose_load",), max_faults=9), 0.5),
)
KINDS = (
    *(each.name for each in STAGE_STEPS),
    *STAGE_FAULTS,
    "read", "registry", "time", "p, broken", "p, error", "d, broken", "d, draining", "d, refused", "dispatch",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_orders_in_two_stages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explore(name, *QUICK[name], capsys)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_more_orders_in_two_stages(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explore(name, *LONG[name], capsys)


def test_random_orders_with_many_faults_take_every_step_of_the_stages() -> None:
    rare = {**dict.fromkeys(KINDS, RARE), **of_faults(STAGE_FAULTS, [*SYSTEMS.values()])}
    take_every_kind(KINDS, SYSTEMS.values(), ALL_FAULTS, NUM_WALKS, rare)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_but_time_is_lost_while_another_instance_is_there(seed: int) -> None:
    """Every caller has an answer, and none waits for a limit: `check_quiet` holds it."""
    for faults in (("drain_decode",), ("render_otherwise",), ("lose_read",), ("forget_prefix",)):
        ended = walk(replace(TURNS, faults=faults, max_faults=1), seed, fault_share=0.1)
        assert {each.outcome for each in ended.requests.values()} == {"answer"}
