"""What an engine knows of the store's slab, found out by its worker when the host asks. Inside EngineCore."""

from typing import Any

from triptych_common.protocol.store import Descriptor, device_memory
from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.host.transport_capabilities import SlabVerdict

log = get_logger(__name__)

PROBE_SLAB = "triptych_probe_slab"
"""Name of the worker's method, and of EngineCore's."""


class UsableSlab:
    """The slab that this engine's worker has mapped and read. Written by EngineCore, read by any thread."""

    def __init__(self) -> None:
        self._verdict = SlabVerdict()

    def learn(self, verdict: SlabVerdict) -> None:
        """Of the slab that the store has now."""
        self._verdict = verdict

    def holds(self, descriptor: Descriptor) -> bool:
        """Whether the entry is in it. Entries of an earlier store's are not."""
        known = self._verdict
        return (
            known.device is not None
            and known.usable_generation == descriptor.generation
            and descriptor.memory == device_memory(known.device)
        )


def probe_in_engine(self: Any) -> dict[str, Any]:
    """`EngineCore.triptych_probe_slab`: ask the worker, and let the connector know before the host announces.

    Returns:
        Fields of a `SlabVerdict`.
    """
    answers: list[dict[str, Any]] = self.collective_rpc(PROBE_SLAB)
    answer = answers[0]
    if len(answers) > 1:
        answer = {**answer, "failure": "the engine is spread over several GPUs"}
    connector = self.scheduler.ec_connector
    connector.slab.learn(SlabVerdict(**answer))
    return answer
