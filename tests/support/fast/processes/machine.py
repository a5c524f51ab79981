"""The machine that a process of a test believes to be on: its network, and its clock."""

import time
from dataclasses import dataclass

from tests.support.hosts.namespaces import enter_namespace


@dataclass(frozen=True)
class Machine:
    """`namespace`: path of its network; None: this machine's own. `clock_ahead_s`: of all others' clocks."""

    namespace: str | None = None
    clock_ahead_s: float = 0.0

    def enter(self) -> None:
        """This process, before it does anything else."""
        if self.namespace is not None:
            enter_namespace(self.namespace)
        if self.clock_ahead_s:
            _put_clock_ahead(self.clock_ahead_s)


HERE = Machine()


def _put_clock_ahead(seconds: float) -> None:
    """The wall clock, as Python code asks for it; what measures how long something takes stays as it is."""
    own_time, own_time_ns = time.time, time.time_ns
    ahead_ns = int(seconds * 1e9)
    time.time = lambda: own_time() + seconds
    time.time_ns = lambda: own_time_ns() + ahead_ns
