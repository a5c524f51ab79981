"""vLLM's connector metadata: orders to the workers with a step, load results back with its output."""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from triptych_vllm_connector.step_orders import LoadedTensor, LoadOrder, WriteOrder


@dataclass
class StepOrders(ECConnectorMetadata):
    """Scheduler -> worker, with each step: tensors to write to the region and to load from it.

    `starts`: pinned tensors that a later step will load, so that a GPU copies them meanwhile; `drops`: items
    among the earlier ones that no step will load.
    `is_late`: a prompt is computed whose turn came before one's that was begun earlier (`PrefillFairness`).
    """

    writes: dict[str, list[WriteOrder]] = field(default_factory=dict)  # by mm_hash
    loads: list[LoadOrder] = field(default_factory=list)
    is_late: bool = False
    starts: list[LoadOrder] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)


@dataclass
class LoadReport(ECConnectorWorkerMetadata):
    """Worker -> scheduler, with a step's output: loaded tensors and failed loads."""

    failed: frozenset[str] = frozenset()  # mm_hashes; see `failed_loads`
    loaded: tuple[LoadedTensor, ...] = ()  # of every rank

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "LoadReport":
        if not isinstance(other, LoadReport):
            return self
        return LoadReport(self.failed | other.failed, self.loaded + other.loaded)
