"""Interface of this worker's connector, for code that must not import it."""

from typing import Protocol, runtime_checkable

from vllm.distributed.ec_transfer import get_ec_transfer

from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.worker.cores.compute_share import ComputeShare
from triptych_vllm_connector.worker.loading import LoadingWorker
from triptych_vllm_connector.worker.writing import WritingWorker


@runtime_checkable
class WorkerConnector(Protocol):
    config: ConnectorConfig
    num_ranks: int
    writer: WritingWorker | None
    loader: LoadingWorker | None
    share: ComputeShare | None


def connector_of_worker() -> WorkerConnector:
    """Connector of the calling worker. Raises TypeError: the engine was started with another one."""
    connector = get_ec_transfer()
    if not isinstance(connector, WorkerConnector):
        raise TypeError(f"expected TriptychECConnector, got {type(connector).__name__}")
    return connector
