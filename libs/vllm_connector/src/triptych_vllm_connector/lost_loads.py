"""Worker -> scheduler, with a step's output: tensors that could not be had, and what is to be undone.

The step ran with zeros in their place. Before its tokens are told to anybody, the requests that it was for
are failed, their tokens dropped, and the blocks of the KV cache that may be wrong are taken out of the
prefix cache, with every other request that uses one of them.
"""

from dataclasses import dataclass
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer import Consumer

log = get_logger(__name__)


@dataclass
class LostLoads(ECConnectorWorkerMetadata):
    """One worker's, or after `aggregate` all ranks'."""

    mm_hashes: frozenset[str]

    def aggregate(self, other: ECConnectorWorkerMetadata) -> "LostLoads":
        return LostLoads(self.mm_hashes | other.mm_hashes) if isinstance(other, LostLoads) else self


def lost_in(runner_output: Any) -> frozenset[str]:
    """The mm_hashes that `runner_output` (vLLM's `ModelRunnerOutput`) says were lost."""
    told = runner_output.ec_connector_output
    metadata = None if told is None else told.ec_connector_worker_meta
    return metadata.mm_hashes if isinstance(metadata, LostLoads) else frozenset()


def undo(lost: frozenset[str], consumer: Consumer, scheduler: Any, runner_output: Any) -> None:
    """See the module docstring. `scheduler` is vLLM's, before `update_from_output`."""
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
