"""Items arrive as they were written: of every size, in both memories, beside other kernels."""

import dataclasses
import statistics
from typing import Any

import pytest

from tests.support.cuda.stub.machines import Machine
from tests.support.cuda.stub.roles import MIB, ROW_BYTES
from tests.support.cuda.stub.system import REGION, SLAB, Passage

KINDS = [REGION, SLAB]


def medians(passages: list[Passage]) -> dict[str, float]:
    """Median of each part, in milliseconds."""
    return {
        part.name: round(statistics.median(getattr(each, part.name) for each in passages), 3)
        for part in dataclasses.fields(Passage)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_items_arrive_as_written(machine: Machine, figures: dict[str, Any], kind: str) -> None:
    """Behind 50 ms of other kernels: a copy or a seal that does not wait for the item's own is wrong."""
    system = machine.start()
    assert system.probe_failures() == []
    for rows in (1, 7, machine.large_rows // 16, machine.large_rows):
        system.pass_on(kind, rows, busy_ms=50.0)
    passages = [system.pass_on(kind, machine.large_rows) for _ in range(machine.num_repeats)]
    figures[f"{machine.large_rows} rows"] = medians(passages)
    system.wait_unpinned()


@pytest.mark.parametrize("kind", KINDS)
def test_large_items_arrive(gpu_machine: Machine, figures: dict[str, Any], kind: str) -> None:
    system = gpu_machine.start(slab_bytes=600 * MIB, region_bytes=600 * MIB)
    for mib in (1, 16, 64):
        rows = mib * MIB // ROW_BYTES
        passages = [system.pass_on(kind, rows) for _ in range(2 + gpu_machine.num_repeats)]
        figures[f"{mib} MiB"] = medians(passages[2:])
    system.wait_unpinned()


def test_how_much_of_a_load_runs_beside_earlier_kernels(
    gpu_machine: Machine, figures: dict[str, Any]
) -> None:
    """Time kernels, a load of 64 MiB out of the region, and the load behind the kernels: figures alone."""
    system = gpu_machine.start(slab_bytes=16 * MIB, region_bytes=300 * MIB)
    order = system.put(REGION, 64 * MIB // ROW_BYTES)
    for name, busy_ms, num_loads in (("kernels", 20.0, 0), ("load", 0.0, 1), ("both", 20.0, 1)):
        pins = [dataclasses.asdict(system.pin(order.mm_hash)) for _ in range(1 + num_loads)]
        figures[name] = round(system.prefill_decode.call("time_load", busy_ms=busy_ms, load=pins), 3)
    system.wait_unpinned()
