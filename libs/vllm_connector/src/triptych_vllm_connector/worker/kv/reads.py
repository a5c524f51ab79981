"""Which worker reads KV caches within their leases: one whose engine takes them."""

from typing import Any


def prepare_kv_reads(vllm_config: Any) -> None:
    """Before vLLM makes its KV connector. An engine that takes none does not import NIXL's."""
    config = vllm_config.kv_transfer_config
    if config is not None and config.is_kv_consumer:
        from triptych_vllm_connector.worker.kv.reader import read_within_leases

        read_within_leases()
