"""What an engine can do with the store's slab: its worker probes, EngineCore keeps it, its host announces it.

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
    """Whether this instance's worker has mapped a store's slab and read from it."""

    device: str | None = None  # UUID of its GPU, "GPU-...", as far as it is known
    generation: int | None = None  # of the store that was probed
    failure: str | None = None  # why not

    @property
    def usable_generation(self) -> int | None:
        return None if self.failure is not None else self.generation


NO_GPU = SlabProbeResult(failure="this engine has no GPU of its own")


class UsableSlab:
    """The slab that this engine's worker has mapped and read. Written by EngineCore, read by any thread."""

    def __init__(self) -> None:
        self._result = SlabProbeResult()

    def set_result(self, result: SlabProbeResult) -> None:
        """Of the slab that the store has now."""
        self._result = result

    def holds(self, descriptor: Descriptor) -> bool:
        """Whether the entry is in it. Entries of an earlier store's are not."""
        known = self._result
        return (
            known.device is not None
            and known.usable_generation == descriptor.generation
            and descriptor.memory == device_memory(known.device)
        )


def probe_in_engine(self: Any) -> dict[str, Any]:
    """`EngineCore.triptych_probe_slab`: probe in the worker; the connector has the result before the host.

    Returns:
        Fields of a `SlabProbeResult`.
    """
    answers: list[dict[str, Any]] = self.collective_rpc(PROBE_SLAB)
    answer = answers[0]
    if len(answers) > 1:
        answer = {**answer, "failure": "the engine is spread over several GPUs"}
    self.scheduler.ec_connector.slab.set_result(SlabProbeResult(**answer))
    return answer
