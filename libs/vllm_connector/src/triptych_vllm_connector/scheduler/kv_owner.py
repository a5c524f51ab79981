"""Describes KV caches in the EngineCore of an engine that prefills: the end of the lease, and the prompt.

The lease ends by this engine's own clock. Both engines render a request, and a template may put the time into
it: without a description of the prompt, KV blocks of other tokens would be taken unnoticed.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from triptych_vllm_connector.seams.replacing import replace

PROMPT = "remote_prompt"  # of `kv_transfer_params`


def describe_kv_caches(kv_connector: Any) -> None:
    """Add `remote_blocks_expiry_time` and `PROMPT` to the answers of vLLM's `kv_connector` (or None).

    vLLM's NIXL connector sends the first for KV caches of decode engines only.
    """
    scheduler = getattr(kv_connector, "connector_scheduler", None)
    if scheduler is None or not hasattr(scheduler, "_reqs_need_send"):
        return
    finish = scheduler.request_finished

    def request_finished(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        is_kept, params = finish(request, block_ids)
        if is_kept and params is not None:
            params["remote_blocks_expiry_time"] = scheduler._reqs_need_send[request.request_id]
            if request.prompt_token_ids is not None:
                # vLLM takes the last tokens off a prompt that the other engine computes again.
                is_cut = (request.kv_transfer_params or {}).get("_p_side_truncated")
                num_cut = scheduler._prefill_backoff() if is_cut else 0
                params[PROMPT] = _description(request.prompt_token_ids, num_cut)
        return is_kept, params

    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector

    users = (NixlBaseConnector.request_finished, NixlBaseConnector.request_finished_all_groups)
    replace(scheduler, "request_finished", request_finished, used_by=users)


def is_of_prompt(params: dict[str, Any], token_ids: Sequence[int] | None) -> bool:
    """True if the KV cache that `params` name is of this prompt, as far as its owner describes it."""
    said = params.get(PROMPT)
    if said is None or token_ids is None:
        return True
    num_computed = said.get("num_computed") if isinstance(said, dict) else None
    if not isinstance(num_computed, int) or not 0 <= num_computed <= len(token_ids):
        return False
    return _description(token_ids[:num_computed], len(token_ids) - num_computed) == said


def _description(computed: Sequence[int], num_cut: int) -> dict[str, Any]:
    """Description of a prompt whose last `num_cut` tokens are not in the KV cache."""
    return {
        "num_tokens": len(computed) + num_cut,
        "num_computed": len(computed),
        "sha256": hashlib.sha256(array("q", computed).tobytes()).hexdigest(),
    }
