"""Compute share: a worker's part of the host's cores or of a GPU, and the share that is fixed."""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from triptych_common.cores.sharing import Work
from triptych_common.protocol.messages import Compute


@dataclass
class CoreRange:
    """Fewest and most cores of one step, whose layers may have had different numbers."""

    fewest: int
    most: int

    def add(self, num_cores: int) -> None:
        self.fewest, self.most = min(self.fewest, num_cores), max(self.most, num_cores)


class ComputeShare(Protocol):
    """A worker's part of the host's cores, or of a GPU; for the thread that runs vLLM's steps."""

    @property
    def range(self) -> CoreRange | None:
        """Numbers of cores used in the step; None where they are not chosen."""

    @property
    def compute(self) -> Compute:
        """Description for the engine's registry record."""

    def watch_layers(self, model: nn.Module) -> None:
        """Call `start_layer` before each layer of `model`, if the share changes then. Encoder only."""

    def start_step(self, work: Work, *, is_late: bool = False) -> None:
        """Start a step of `work`; `is_late` marks a prompt whose turn is overdue."""

    def start_layer(self) -> None:
        """Start the next layer of the step."""

    def end_step(self) -> None:
        """End the step; nothing is computed until the next one."""

    def close(self) -> None: ...


class FixedShare:
    """Share that stays as the process was started: the CPU's threads, or a GPU.

    The GPU and its driver decide which process's kernels run, from how the engine's process was started
    (`cores.gpu_plan`); docs/design/gpus.md explains why no step waits for another engine's.
    """

    range: CoreRange | None = None

    def __init__(self, compute: Compute) -> None:
        self.compute = compute

    def watch_layers(self, model: nn.Module) -> None:
        """No effect: vLLM may compile or capture the layers."""

    def start_step(self, work: Work, *, is_late: bool = False) -> None: ...

    def start_layer(self) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...
