"""Slab probe: the worker tries the store's slab, EngineCore keeps the result, the host announces it.

host --PROBE_SLAB--> EngineCore (`probe_in_engine`) --PROBE_SLAB--> worker --SlabProbeResult--> both
"""

from dataclasses import dataclass
from typing import Any

from triptych_common.protocol.store import Descriptor, device_memory

PROBE_SLAB = "triptych_probe_slab"
"""Name of the worker's method, and of EngineCore's."""

MAX_FAILURE_CHARS = 300  # as in `InstanceRecord.slab_failure`


@dataclass(frozen=True)
class SlabProbeResult:
    """Result of mapping and reading a store's slab in this instance's worker."""

    device: str | None = None  # UUID of its GPU, "GPU-...", as far as it is known
    generation: int | None = None  # of the store that was probed
    failure: str | None = None  # why not

    @property
    def usable_generation(self) -> int | None:
        return None if self.failure is not None else self.generation


NO_GPU = SlabProbeResult(failure="this engine has no GPU of its own")


class UsableSlab:
    """Slab that this engine's worker has mapped and read. EngineCore writes it, any thread reads it."""

    def __init__(self) -> None:
        self._result = SlabProbeResult()

    def set_result(self, result: SlabProbeResult) -> None:
        self._result = result

    def holds(self, descriptor: Descriptor) -> bool:
        """True if the entry is in this slab; entries of an earlier store are not."""
        known = self._result
        return (
            known.device is not None
            and known.usable_generation == descriptor.generation
            and descriptor.memory == device_memory(known.device)
        )


def probe_in_engine(self: Any) -> dict[str, Any]:
    """Probe in the worker as `EngineCore.triptych_probe_slab`; the connector gets the result before the host.

    Returns:
        Fields of a `SlabProbeResult`.
    """
    answers: list[dict[str, Any]] = self.collective_rpc(PROBE_SLAB)
    answer = answers[0]
    if len(answers) > 1:
        answer = {**answer, "failure": "the engine is spread over several GPUs"}
    self.scheduler.ec_connector.slab.set_result(SlabProbeResult(**answer))
    return answer
