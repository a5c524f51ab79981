"""Worker class for GPUs, given to vLLM by `--worker-cls`."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from triptych_vllm_connector.seams.replacing import require_names
from triptych_vllm_connector.worker.encoder_memory import try_largest_steps
from triptych_vllm_connector.worker.kv.opening import prepare_kv_transfer
from triptych_vllm_connector.worker.rpc import WorkerRpc
from triptych_vllm_connector.worker.runner_wrappers import wrap


class TriptychGPUWorker(WorkerRpc, Worker):
    """GPU worker that wraps its runner in vLLM's method that builds it."""

    def init_device(self) -> None:
        require_names((Worker._init_workspace_and_model_runner,), "_make_model_runner")
        prepare_kv_transfer(self.vllm_config)
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        if self.vllm_config.ec_transfer_config.is_ec_producer:
            try_largest_steps(self)

    def _make_model_runner(self) -> Any:
        return wrap(super()._make_model_runner(), self.vllm_config.ec_transfer_config.is_ec_producer)
