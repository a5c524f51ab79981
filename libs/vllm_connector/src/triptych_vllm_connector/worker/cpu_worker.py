"""Worker class for the CPU, given to vLLM by `--worker-cls`."""

from typing import Any

import torch._dynamo
from vllm.v1.worker.cpu_worker import CPUWorker

from triptych_vllm_connector.worker.kv.opening import prepare_kv_transfer
from triptych_vllm_connector.worker.rpc import WorkerRpc
from triptych_vllm_connector.worker.runner_wrappers import wrap


class TriptychCPUWorker(WorkerRpc, CPUWorker):
    """CPU worker that wraps its runner right after `init_device`, in which vLLM builds it."""

    model_runner: Any

    def init_device(self) -> None:
        if self.model_config.enforce_eager:
            # vLLM has torch compile helpers all the same, when a request first needs them: the ranks of log
            # probabilities. That takes a C++ compiler, and 15 s or more of a step that all requests wait for.
            torch._dynamo.config.disable = True
        prepare_kv_transfer(self.vllm_config)
        super().init_device()
        self.model_runner = wrap(self.model_runner, self.vllm_config.ec_transfer_config.is_ec_producer)
