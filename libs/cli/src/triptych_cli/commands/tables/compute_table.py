"""Table of engines: what each computes on, how that is shared, and by which policy."""

from collections.abc import Sequence
from itertools import groupby

from rich.markup import escape
from rich.table import Table

from triptych_cli.console import plain_table
from triptych_common.cores.gpu_plan import BELOW_NORMAL
from triptych_common.protocol.messages import Compute, InstanceRecord


def compute_table(records: Sequence[InstanceRecord]) -> Table:
    """One row per registered engine."""
    table = plain_table("engine", "role", "computes on", "shared by", "core policy")
    for record in records:
        if record.compute is not None:
            compute = record.compute
            place, sharing = describe_place(compute), describe_sharing(compute)
            row = (record.instance, record.role.value, place, sharing, compute.policy or "-")
            table.add_row(*(escape(each) for each in row))
    return table


def describe_place(compute: Compute) -> str:
    """Text such as `cores 0-3,8`, or `GPU 0, 66 multiprocessors`."""
    if compute.gpu is not None:
        gpu = compute.gpu if compute.gpu.startswith(("GPU-", "MIG-")) else f"GPU {compute.gpu}"
        number = compute.num_multiprocessors
        return gpu if number is None else f"{gpu}, {number} multiprocessors"
    if compute.cores:
        return f"cores {_ranges(compute.cores)}"
    return "CPU"


def describe_sharing(compute: Compute) -> str:
    """Text such as `mps with 1 other, below normal`."""
    words = [compute.sharing.value]
    if compute.gpu is not None and compute.num_engines > 1:
        words[0] += f" with {compute.num_engines - 1} other{'s' if compute.num_engines > 2 else ''}"
    if compute.thread_percentage is not None:
        words.append(f"{compute.thread_percentage} % of the threads at most")
    if compute.priority is not None:
        words.append("below normal" if compute.priority == str(BELOW_NORMAL) else "normal")
    return ", ".join(words)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges, such as `0-3,8`."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(sorted(numbers)), key=lambda place: place[1] - place[0])
    ]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
