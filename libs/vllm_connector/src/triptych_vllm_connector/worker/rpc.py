"""Methods of our worker classes that hosts call by name (`collective_rpc`)."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import _measure_on_worker
from vllm.model_executor.models.utils import StageMissingLayer

from triptych_common.protocol.messages import Compute
from triptych_vllm_connector.worker.ports import connector_of_worker
from triptych_vllm_connector.worker.step_check import check_steps

ENCODER_WIDTHS = "triptych_encoder_widths"
CHECK_STEPS = "triptych_check_steps"
COMPUTE = "triptych_compute"
WAIT_WRITTEN = "triptych_wait_written"
LAYERS_NOT_LOADED = "triptych_layers_not_loaded"
KEEP_RANDOM_STATE = "triptych_keep_random_state"
RESTORE_RANDOM_STATE = "triptych_restore_random_state"


async def compute_of(engine: Any) -> Compute | None:
    """Compute resources of the engine's first rank; `engine` is vLLM's client. Called in the host."""
    reports: list[str] = await engine.collective_rpc(COMPUTE)
    return Compute.model_validate_json(reports[0]) if reports and reports[0] else None


class WorkerRpc:
    """Mixin of the worker classes with methods for `collective_rpc`."""

    def triptych_encoder_widths(self: Any) -> dict[str, int]:
        """Columns of the encoder's output, by modality, measured on a dummy item; {} without an encoder."""
        widths: dict[str, int] = _measure_on_worker(self)
        return widths

    def triptych_check_steps(self) -> dict[str, Any]:
        """Fields of a `StepCheck`: whether the model's videos can be encoded in pieces."""
        return asdict(check_steps(self))

    def triptych_layers_not_loaded(self: Any) -> list[str]:
        """Names of the model's parts that this engine does not load: towers, a language model."""
        modules = self.get_model().named_modules()
        return [name for name, module in modules if isinstance(module, StageMissingLayer)]

    def triptych_keep_random_state(self: Any) -> None:
        """Save the state of this worker's random numbers for `triptych_restore_random_state`."""
        gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.kept_random_state = np.random.get_state(), torch.get_rng_state(), gpu

    def triptych_restore_random_state(self: Any) -> None:
        numpy, cpu, gpu = self.kept_random_state
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)

    def triptych_compute(self) -> str:
        """A `Compute` as JSON; empty without a share."""
        share = connector_of_worker().share
        return "" if share is None else share.compute.model_dump_json()

    def triptych_wait_written(self, timeout_s: float) -> bool:
        """True if the GPU has written all items of earlier steps, after at most `timeout_s`.

        Raises:
            CudaError: the GPU has failed.
        """
        writer = connector_of_worker().writer
        return writer is None or writer.wait_written(timeout_s)

    def triptych_probe_slab(self) -> dict[str, Any]:
        """Fields of a `SlabProbeResult`: whether this worker can use the slab of the store as it is now."""
        connector = connector_of_worker()
        worker = connector.writer or connector.loader
        if worker is None:
            raise TypeError("the connector has no worker's side")
        return asdict(worker.probe_slab())
