"""vLLM's connector metadata: step orders to the workers, failed loads back with a step's output."""

from dataclasses import dataclass, field

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata, ECConnectorWorkerMetadata

from triptych_vllm_connector.step_orders import LoadOrder, WriteOrder


@dataclass
class StepOrders(ECConnectorMetadata):
    """Scheduler -> worker, with each step: what to write to the region, and what to load from it."""

    writes: dict[str, list[WriteOrder]] = field(default_factory=dict)  # by mm_hash
    loads: list[LoadOrder] = field(default_factory=list)


@dataclass
class FailedLoads(ECConnectorWorkerMetadata):
    """Worker -> scheduler, with a step's output: tensors that could not be read (see `failed_loads`)."""

    mm_hashes: frozenset[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "FailedLoads":
        return FailedLoads(self.mm_hashes | other.mm_hashes) if isinstance(other, FailedLoads) else self
