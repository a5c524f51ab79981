"""Several stores among real parts: no wrong tensor, no hang, nothing kept on either side, bounded attempts.

The gateway's `TransferOrders` with all behind it, and the fabric agents of both ends but for their sockets
and threads are the real ones (see `tests.support.protocol_world.transfers`). Orders as in
`test_protocol_model`.
"""

from dataclasses import replace

import pytest

from tests.property.protocol.test_protocol_model import USUAL, explore
from tests.support.protocol_steps import FABRIC_STEPS
from tests.support.protocol_world.config import FAULTS, TRANSFER_FAULTS, Config
from tests.support.protocol_world.explore import Bounds
from tests.support.protocol_world.random_walk import RareWalk, after, of_faults, take_every_kind, walk

ALL_FAULTS = (*FAULTS, *TRANSFER_FAULTS)
OF_TRANSFERS = (*TRANSFER_FAULTS, "restart_store", "lose_region", "evict", "crash_encoder", "cancel")
FAR = Config(requests=((0,),), rows=(2,), num_stores=2, encoders_at=(0,), consumers_at=(1,))
BOTH = replace(
    FAR,
    requests=((0, 1), (1, 0)),
    rows=(2, 2),
    num_encoders=2,
    encoders_at=(0, 1),
    num_consumers=2,
    consumers_at=(1, 0),
)
"""Each item may be made at either store, and is needed at both."""
THREE = replace(
    BOTH, requests=((0, 1), (1,), (0,)), num_stores=3, consumers_at=(2, 0), num_gateways=2
)  # to a store without encoders, from two
TIGHT = replace(BOTH, num_blocks=1, is_tight=True)  # a store has room for one item
SMALL = replace(FAR, requests=((0, 1),), rows=(2, 2), fabric_budget=32)  # an agent takes one item at a time
SYSTEMS = {"far": FAR, "both": BOTH, "three": THREE, "tight": TIGHT, "small": SMALL}

QUICK: dict[str, tuple[Config, Bounds]] = {
    "1 item, 1 deviation": (replace(FAR, is_coarse=True), Bounds(max_deviations=1)),
    "1 item, usual order, 1 fault of transfers": (
        replace(FAR, is_coarse=True, faults=OF_TRANSFERS, max_faults=1),
        USUAL,
    ),
    "2 items, usual order": (replace(BOTH, is_coarse=True), USUAL),
}
LONG: dict[str, tuple[Config, Bounds]] = {
    "1 item, coarse orders": (replace(FAR, is_coarse=True), Bounds(max_states=20_000)),
    "1 item, usual order, 1 fault": (replace(FAR, is_coarse=True, faults=ALL_FAULTS, max_faults=1), USUAL),
    "2 items, 1 deviation": (replace(BOTH, is_coarse=True), Bounds(max_deviations=1)),
    "2 items, usual order, 1 fault of transfers": (
        replace(BOTH, is_coarse=True, faults=OF_TRANSFERS, max_faults=1),
        USUAL,
    ),
}

NUM_WALKS = 12  # of each system


LATE = RareWalk(after(FAR, "crash_encoder"), 0.1, slow="encoder-0")
"""The target has reserved before the encoder is done; then that dies."""
RARE: dict[str, RareWalk] = {
    "sealed_to_source": LATE,
    "writer_lost_to_source": LATE,
    "unwatch_source": LATE,
    "failed, writer_lost": LATE,
    "frame, cancel": LATE,
    "job, spare": RareWalk(after(BOTH, "crash_encoder"), 0.2),
    "link, refused": RareWalk(after(BOTH, "restart_store"), 0.05),
    "frame, present": RareWalk(after(replace(THREE, shares_consumer=True), "crash_agent"), 0.05),
    "failed, corrupted": RareWalk(after(FAR, "damage"), 0.3),
    "failed, absent": RareWalk(after(FAR, "crash_encoder"), 0.16),
    "failed, expired": RareWalk(after(FAR, "hurry"), 0.05),
}
"""What seldom happens, and where it does."""
KINDS = (
    *(each.name for each in FABRIC_STEPS if each.name not in ("heartbeat_agent", "call_target")),
    *TRANSFER_FAULTS,
    "registry", "announce", "order_again", "silence", "job, spare",
    "link, hello", "link, refused", "link, end",
    "frame, present", "frame, end", "frame, cancel", "frame, failed",
    "failed, absent", "failed, writer_lost", "failed, unreachable", "failed, corrupted", "failed, expired",
)  # fmt: skip


@pytest.mark.parametrize("name", QUICK)
def test_orders_of_several_stores(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explore(name, *QUICK[name], capsys)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_more_orders_of_several_stores(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    explore(name, *LONG[name], capsys)


def test_random_orders_with_many_faults_take_every_step_of_a_transfer() -> None:
    rare = {**of_faults(TRANSFER_FAULTS, [FAR, BOTH]), **{kind: [each] for kind, each in RARE.items()}}
    take_every_kind(KINDS, SYSTEMS.values(), ALL_FAULTS, NUM_WALKS, rare)


@pytest.mark.parametrize("seed", range(4))
def test_nothing_but_time_is_lost_while_attempts_are_left(seed: int) -> None:
    """Every caller has an answer: `check_quiet` holds it, too."""
    for fault in (*TRANSFER_FAULTS, "restart_store", "evict", "crash_encoder"):
        if fault != "block_link":
            ended = walk(replace(BOTH, faults=(fault,), max_faults=1), seed, fault_share=0.05)
            assert {each.outcome for each in ended.requests.values()} == {"answer"}


@pytest.mark.parametrize("seed", range(4))
def test_with_one_store_no_agent_hears_of_anything(seed: int) -> None:
    one = replace(BOTH, num_stores=1, encoders_at=(), consumers_at=())
    ended = walk(replace(one, faults=ALL_FAULTS, max_faults=4), seed, fault_share=0.05)
    of_transfers = {each.name for each in FABRIC_STEPS} - {"hello_agent"}
    assert not of_transfers & {kind for kind, num in ended.coverage.items() if num}
