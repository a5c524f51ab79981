"""Worker class for GPUs, given to vLLM by `--worker-cls`."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from triptych_vllm_connector.worker.kv.opening import prepare_kv_transfer
from triptych_vllm_connector.worker.rpc import WorkerRpc
from triptych_vllm_connector.worker.runner_wrappers import wrap


class TriptychGPUWorker(WorkerRpc, Worker):
    """GPU worker that wraps its runner in vLLM's method that builds it."""

    def init_device(self) -> None:
        prepare_kv_transfer(self.vllm_config)
        super().init_device()

    def _make_model_runner(self) -> Any:
        return wrap(super()._make_model_runner(), self.vllm_config.ec_transfer_config.is_ec_producer)
