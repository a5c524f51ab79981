"""A writer is killed, the GPU is full, the store restarts."""

import threading
import time
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.cuda.stub.machines import Machine
from tests.support.cuda.stub.roles import ENCODER, MIB, ROW_BYTES
from tests.support.cuda.stub.system import REGION, SLAB, StubSystem, wait_for

KINDS = [REGION, SLAB]
QUEUED_MS = 1500.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_writers_copy_does_not_reach_the_next_item(
    gpu_machine: Machine, figures: dict[str, Any], kind: str
) -> None:
    """The writer is killed with its copy queued on the GPU, and another one is given its place."""
    system = gpu_machine.start(slab_bytes=16 * MIB, region_bytes=16 * MIB)
    other = system.start_role(ENCODER, "encoder-1")
    other.wait_started()
    system.pass_on(kind, 1)  # kernels are loaded
    rows = 6 * MIB // ROW_BYTES
    dead = system.reserve(kind, rows)
    system.encoder.send("write", order=asdict(dead), seed=system.seed, busy_ms=QUEUED_MS)
    threading.Event().wait(0.3)  # the copy is queued by now; no process can see when
    killed_s = time.monotonic()
    system.encoder.kill()
    while True:  # what is sealed stays pinned, so that one of the next gets the dead writer's place
        order = system.reserve(kind, rows, writer="encoder-1")
        given_after_s = time.monotonic() - killed_s
        other.call("write", order=asdict(order), seed=system.seed)
        pinned = system.pin(order.mm_hash)
        if order.offset < dead.offset + rows * ROW_BYTES and dead.offset < order.offset + rows * ROW_BYTES:
            break
    figures["given again after ms"] = round(given_after_s * 1e3, 1)
    threading.Event().wait(2 * QUEUED_MS / 1e3)  # a copy that still runs would be through by then
    system.step(load=pinned, gather=[(order.mm_hash, system.seed)])
    assert system.prefill_decode.call("collect") == 0, "a dead writer's copy came into another's item"


@pytest.mark.parametrize(("kind", "is_loaded"), [(SLAB, True), (REGION, False)])
def test_a_full_gpu_costs_one_item_where_a_copy_needs_memory(
    gpu_machine: Machine, kind: str, is_loaded: bool
) -> None:
    system = gpu_machine.start(slab_bytes=160 * MIB, region_bytes=160 * MIB)
    system.prefill_decode.call("probe")
    order = system.put(kind, 64 * MIB // ROW_BYTES)
    pinned = system.pin(order.mm_hash)
    system.prefill_decode.call("take_memory", leave_mib=48)
    failed = system.step(load=pinned)["failed"]
    system.prefill_decode.call("collect")
    system.prefill_decode.call("give_memory_back")
    assert failed == ([] if is_loaded else [order.mm_hash])
    system.drop(order.mm_hash)
    system.pass_on(kind, 256)
    system.wait_unpinned()


def test_an_item_in_use_outlives_its_store_and_restarts_keep_no_memory(
    machine: Machine, is_fake: bool, figures: dict[str, Any]
) -> None:
    slab_bytes = (64 if is_fake else 1024) * MIB
    system: StubSystem = machine.start(slab_bytes=slab_bytes)
    free: list[int] = []
    for turn in range(4):
        wait_for(lambda: system.probe_failures() == [], f"both roles use the slab of start {turn}")
        order = system.put(SLAB, machine.large_rows)
        gather = [(order.mm_hash, system.seed)]
        system.step(load=system.pin(order.mm_hash), gather=gather)
        assert system.prefill_decode.call("collect") == 0
        free.append(system.prefill_decode.call("free_bytes"))
        system.kill_store()
        system.step(gather=gather, busy_ms=20.0)
        assert system.prefill_decode.call("collect") == 0, "an item of a store that is gone"
        system.restart_store()
        system.drop(order.mm_hash)
    figures["free bytes"] = free
    assert free[0] - free[-1] <= slab_bytes // 2
