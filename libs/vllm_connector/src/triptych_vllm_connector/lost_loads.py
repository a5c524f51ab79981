"""Tensors that a worker could not have, as its step's output tells the scheduler; what is to be undone then.

The step ran with zeros in their place. Before its tokens are told to anybody, the requests that it was for
are failed, their tokens dropped, and the blocks of the KV cache that may be wrong are taken out of the
prefix cache, with every other request that uses one of them.
"""

from typing import Any

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer import Consumer

log = get_logger(__name__)


def undo(lost: frozenset[str], consumer: Consumer, scheduler: Any, runner_output: Any) -> None:
    """`lost` are mm_hashes; `scheduler` is vLLM's before its `update_from_output(…, runner_output)`."""
    first_tokens = consumer.load_lost(lost)
    wrong: set[int] = set()
    for request_id, first_token in first_tokens.items():
        wrong |= _blocks_from(scheduler, request_id, first_token)
    failed = set(first_tokens)
    for request in scheduler.running:
        if request.request_id not in failed and wrong & _blocks_from(scheduler, request.request_id, 0):
            consumer.fail(request.request_id, "an item in its cached prefix could not be read")
            failed.add(request.request_id)
    scheduler.kv_cache_manager.evict_blocks(wrong)
    for request_id in failed:
        index = runner_output.req_id_to_index.get(request_id)
        if index is not None and runner_output.sampled_token_ids:
            runner_output.sampled_token_ids[index] = []
    log.warning("loads lost", num_items=len(lost), num_requests=len(failed))


def _blocks_from(scheduler: Any, request_id: str, first_token: int) -> set[int]:
    """Blocks with the request's tokens from `first_token` on, of all groups, without vLLM's null block."""
    skipped = first_token // scheduler.block_size
    groups = scheduler.kv_cache_manager.get_block_ids(request_id)
    null_id = scheduler.kv_cache_manager.block_pool.null_block.block_id
    return {block for blocks in groups for block in blocks[skipped:] if block != null_id}
