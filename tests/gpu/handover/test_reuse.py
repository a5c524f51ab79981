"""Blocks are given again at once, with two steps in flight and reads that come late."""

import dataclasses
from collections import deque
from typing import Any

import pytest

from tests.support.cuda.stub.machines import Machine
from tests.support.cuda.stub.roles import MIB, ROW_BYTES
from tests.support.cuda.stub.system import REGION, SLAB

HEADER_BYTES = MIB  # of a region, or less
NUM_STEPS, NUM_STEPS_FAKE = 1000, 30


@pytest.mark.parametrize("kind", [REGION, SLAB])
def test_blocks_used_again_at_once_hold_the_newest_item(
    machine: Machine, is_fake: bool, figures: dict[str, Any], kind: str
) -> None:
    """A pin that ends, or a seal that comes, before the GPU is done shows as wrong numbers.

    There is room for three items: one is read, one is dropped, one is written.
    """
    rows = machine.large_rows // 4
    num_bytes = 3 * rows * ROW_BYTES
    system = machine.start(slab_bytes=num_bytes, region_bytes=num_bytes + HEADER_BYTES)
    reader = system.prefill_decode
    num_steps = NUM_STEPS_FAKE if is_fake else NUM_STEPS
    held: deque[str] = deque()
    wrong: list[int] = []
    for number in range(num_steps):
        order = system.put(kind, rows, busy_ms=(number % 3) * 0.5)
        pinned = dataclasses.asdict(system.pin(order.mm_hash))
        drop = [held.popleft()] if held else []
        gather = [(order.mm_hash, system.seed)]
        # The item is read after `busy_ms` of other kernels, and dropped by the step behind it.
        reader.send("step", drop=drop, load=[pinned], gather=gather, busy_ms=(number % 5) * 4.0)
        held.append(order.mm_hash)
        if number:
            reader.send("collect")  # of the step before
        assert not reader.receive()["failed"]
        if number and reader.receive():
            wrong.append(number - 1)
    if reader.call("collect"):
        wrong.append(num_steps - 1)
    system.drop(*held)
    system.wait_unpinned()
    figures["steps"], figures["wrong"] = num_steps, len(wrong)
    assert wrong == [], "steps with wrong numbers"
