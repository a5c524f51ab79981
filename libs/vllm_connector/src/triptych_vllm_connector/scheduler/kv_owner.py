"""EngineCore of an engine that prefills: says when the lease of each KV cache ends, by its own clock."""

from typing import Any


def date_leases(kv_connector: Any) -> None:
    """`kv_connector`: vLLM's of this engine, or None. Its answers get `remote_blocks_expiry_time`.

    vLLM's NIXL connector knows it, and tells it for KV caches of decode engines alone.
    """
    scheduler = getattr(kv_connector, "connector_scheduler", None)
    if scheduler is None or not hasattr(scheduler, "_reqs_need_send"):
        return
    finish = scheduler.request_finished

    def request_finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_kept, params = finish(request, block_ids)
        if is_kept and params is not None:
            params["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request.request_id]
        return is_kept, params

    scheduler.request_finished = request_finished
