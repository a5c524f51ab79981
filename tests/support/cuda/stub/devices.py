"""The GPU as the stub of vLLM's runner uses it: torch's, or host memory."""

from collections.abc import Callable
from typing import Protocol

import torch

CYCLES_PER_MS = 1_700_000  # of an H100, about


class StubDevice(Protocol):
    """Device of one role's process."""

    name: str  # torch's
    worker_type: str  # what the worker is given
    max_rows: int  # of a step's inputs

    def use_own_stream(self) -> None:
        """Make a stream of torch's pool the current one, which does not wait for the default stream."""

    def keep_busy(self, milliseconds: float) -> None:
        """Queue a kernel that takes so long."""

    def synchronize(self) -> None: ...

    def is_done(self) -> bool:
        """Return whether the current stream has nothing left to do."""

    def on_cpu(self, mask: torch.Tensor) -> torch.Tensor:
        """Return a mask in memory that the device copies from without a wait."""

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture `run` in a CUDA graph; the result replays it."""

    def fetch(self, value: torch.Tensor) -> Callable[[], int]:
        """Copy one number to the host on a stream of its own; the result waits for it."""

    def free_bytes(self) -> int: ...


class CudaStubDevice:
    """GPU 0 of this process."""

    name = worker_type = "cuda"
    max_rows = 16384

    def __init__(self) -> None:
        self._fetching: torch.cuda.Stream = torch.cuda.Stream()

    def use_own_stream(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)

    def keep_busy(self, milliseconds: float) -> None:
        if milliseconds:
            torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def is_done(self) -> bool:
        return bool(torch.cuda.current_stream().query())

    def on_cpu(self, mask: torch.Tensor) -> torch.Tensor:
        return mask.pin_memory()

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    def fetch(self, value: torch.Tensor) -> Callable[[], int]:
        host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        event, current = torch.cuda.Event(blocking=True), torch.cuda.current_stream()
        with torch.cuda.stream(self._fetching):
            self._fetching.wait_stream(current)
            host.copy_(value, non_blocking=True)
            event.record()
        current.wait_stream(self._fetching)  # the next step writes `value` again

        def wait() -> int:
            event.synchronize()
            return int(host)

        return wait

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])


class HostStubDevice:
    """Host memory plays the GPU: each call is done when it returns."""

    name = "cpu"
    max_rows = 512

    def __init__(self, worker_type: str = "fake") -> None:
        """A worker of another type than "cpu" makes its GPU transports."""
        self.worker_type = worker_type

    def use_own_stream(self) -> None:
        pass

    def keep_busy(self, milliseconds: float) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def on_cpu(self, mask: torch.Tensor) -> torch.Tensor:
        return mask

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def fetch(self, value: torch.Tensor) -> Callable[[], int]:
        number = int(value)
        return lambda: number

    def free_bytes(self) -> int:
        return 0
