"""Prepares a worker for KV transfer, before vLLM makes its KV connector."""

from functools import partial
from typing import Any

from triptych_vllm_connector.seams.replacing import replace

CPU = "cpu"


def prepare_kv_transfer(vllm_config: Any) -> None:
    """Prepare NIXL; an engine without a KV connector does not import it."""
    config = vllm_config.kv_transfer_config
    if config is None:
        return
    if vllm_config.device_config.device_type == CPU:
        _stop_spinning()
    if config.is_kv_consumer:
        from triptych_vllm_connector.worker.kv.reader import read_within_leases

        read_within_leases()


def _stop_spinning() -> None:
    """Turn NIXL's progress thread off, which never sleeps: an idle engine would take a core.

    Without it transfers proceed when polled. vLLM polls in each step, and steps while one of its own KV
    caches is to be read, or it reads one.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

    agent_config = base_worker.nixl_agent_config
    if agent_config is not None and not isinstance(agent_config, partial):
        replace(
            base_worker,
            "nixl_agent_config",
            partial(agent_config, enable_prog_thread=False),
            used_by=(base_worker.NixlBaseConnectorWorker.__init__,),
            everywhere=False,
        )
