"""What a worker reports of its steps, whatever it computes on; and the share that needs none of it."""

from typing import Protocol

from torch import nn

from triptych_common.cores.sharing import Work
from triptych_common.protocol.messages import Compute
from triptych_vllm_connector.worker.cores.core_range import CoreRange


class ComputeShare(Protocol):
    """A worker's part of the host's cores, or of a GPU. For the thread that runs vLLM's steps."""

    @property
    def range(self) -> CoreRange | None:
        """Cores of the step; None: they are not chosen."""

    @property
    def compute(self) -> Compute:
        """What the engine's record says of it."""

    def watch_layers(self, model: nn.Module) -> None:
        """Encoder: have `start_layer` called before each layer of `model`, if the share changes with them."""

    def start_step(self, work: Work, *, is_late: bool = False) -> None:
        """The step computes `work`. `is_late`: a prompt of it should have been computed before."""

    def start_layer(self) -> None:
        """The next layer of the step."""

    def end_step(self) -> None:
        """Nothing is computed until the next step."""

    def close(self) -> None: ...


class FixedShare:
    """Nothing is chosen from step to step: threads of the CPU as they were started, or a GPU.

    Which process's kernels a GPU runs is decided by the GPU and its driver, from what the engine's process
    was started with (`cores.gpu_plan`); docs/design/gpus.md tells why no step waits for another engine's.
    """

    range: CoreRange | None = None

    def __init__(self, compute: Compute) -> None:
        self.compute = compute

    def watch_layers(self, model: nn.Module) -> None:
        """Layers stay as they are: vLLM may compile or capture them."""

    def start_step(self, work: Work, *, is_late: bool = False) -> None: ...

    def start_layer(self) -> None: ...

    def end_step(self) -> None: ...

    def close(self) -> None: ...
