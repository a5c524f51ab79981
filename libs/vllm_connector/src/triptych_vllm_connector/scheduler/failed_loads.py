"""Failed loads: undoes a step for tensors that a worker could not read, as its output reports.

The step ran with zeros in their place. Before its tokens are sent to any client, the requests that it was for
are failed, their tokens dropped, and the blocks of the KV cache that may be wrong are taken out of the
prefix cache, with every other request that uses one of them.

vLLM enters a block into the prefix cache when it schedules it, and a request may end or be preempted before
the output of its step has come. It holds nothing any more by then, but its blocks can still be found: they
are noted when it departs.

Under async scheduling the output of a step is handled when the next one is scheduled already, and vLLM counts
tokens as computed when it schedules them. A request keeps an item until no step without output loads it, so
that a failure finds the request (`LoadsInFlight.is_loading`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from triptych_common.telemetry.logs import get_logger
from triptych_vllm_connector.consumer.consumer import Consumer

log = get_logger(__name__)


@dataclass(frozen=True)
class DepartedRequest:
    """A request that ended, was preempted or lost its view before the output of a step had come."""

    engine_request_id: str
    first_token: int  # from here on its keys and values depend on the item
    block_hashes: dict[int, Any]  # by block id: those of the prefix cache that depend on the item


class LoadsInFlight:
    """Loads of steps without output by mm_hash, and requests that departed meanwhile; empty when idle."""

    def __init__(self) -> None:
        self._num_steps: Counter[str] = Counter()
        self._departed: dict[str, list[DepartedRequest]] = {}

    def on_step_scheduled(self, mm_hashes: Iterable[str]) -> None:
        self._num_steps.update(mm_hashes)

    def on_step_output(self, mm_hashes: Iterable[str]) -> None:
        for mm_hash in mm_hashes:
            self._num_steps[mm_hash] -= 1
            if self._num_steps[mm_hash] <= 0:
                del self._num_steps[mm_hash]
                self._departed.pop(mm_hash, None)

    def is_loading(self, mm_hash: str) -> bool:
        """True if a step without output loads the item."""
        return mm_hash in self._num_steps

    def note_departure(self, request: Any, scheduler: Any) -> None:
        """Record the blocks of a request that ends, is preempted or loses its view; it still has them."""
        if not self._num_steps:
            return
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        for feature in request.mm_features:
            if feature.identifier in self._num_steps:
                first_token = feature.mm_position.offset
                ids = _blocks_from(scheduler, request.request_id, first_token)
                hashes = {
                    each: blocks[each].block_hash for each in ids if blocks[each].block_hash is not None
                }
                departed = DepartedRequest(request.request_id, first_token, hashes)
                self._departed.setdefault(feature.identifier, []).append(departed)

    def departed_from(self, mm_hashes: Iterable[str]) -> Iterator[DepartedRequest]:
        for mm_hash in mm_hashes:
            yield from self._departed.get(mm_hash, ())


def undo_failed_loads(
    mm_hashes: frozenset[str],
    consumer: Consumer,
    in_flight: LoadsInFlight,
    scheduler: Any,
    runner_output: Any,
) -> None:
    """Fail the requests of these mm_hashes; called before vLLM's `update_from_output(…, runner_output)`."""
    first_tokens = consumer.on_loads_failed(mm_hashes)
    wrong: set[int] = set()
    for engine_request_id, first_token in first_tokens.items():
        wrong |= _blocks_from(scheduler, engine_request_id, first_token)
    failed = set(first_tokens)
    blocks = scheduler.kv_cache_manager.block_pool.blocks
    for departed in in_flight.departed_from(mm_hashes):
        engine_request_id = departed.engine_request_id
        # A block with another hash holds something else by now.
        wrong |= {each for each, was in departed.block_hashes.items() if blocks[each].block_hash == was}
        wrong |= _blocks_from(scheduler, engine_request_id, departed.first_token)  # if it runs on, or again
        consumer.fail_request(engine_request_id, "the item could not be read")  # nothing, if it has ended
        failed.add(engine_request_id)
    spoilt = set(wrong)
    for engine_request_id in scheduler.requests:
        if after := _blocks_after(scheduler, engine_request_id, wrong):
            spoilt |= after
            if engine_request_id not in failed:
                consumer.fail_request(engine_request_id, "an item in its cached prefix could not be read")
                failed.add(engine_request_id)
    scheduler.kv_cache_manager.evict_blocks(spoilt)
    for engine_request_id in failed:
        _drop_output(runner_output, engine_request_id)
    log.warning("loads failed", num_items=len(mm_hashes), num_requests=len(failed))


def _drop_output(runner_output: Any, engine_request_id: str) -> None:
    """Empty the step's output for the request, since vLLM takes an output only as a whole."""
    index = runner_output.req_id_to_index.get(engine_request_id)
    if index is None:
        return
    if runner_output.sampled_token_ids:
        runner_output.sampled_token_ids[index] = []
    if runner_output.pooler_output:
        runner_output.pooler_output[index] = None
    runner_output.prompt_logprobs_dict.pop(engine_request_id, None)
    runner_output.prompt_token_id_logprobs_dict.pop(engine_request_id, None)


def _blocks_after(scheduler: Any, engine_request_id: str, wrong: set[int]) -> set[int]:
    """The request's first block that is among `wrong`, and all blocks computed from it."""
    groups = scheduler.kv_cache_manager.get_block_ids(engine_request_id)
    places = [place for blocks in groups for place, block in enumerate(blocks) if block in wrong]
    return _blocks_from(scheduler, engine_request_id, min(places) * scheduler.block_size) if places else set()


def _blocks_from(scheduler: Any, engine_request_id: str, first_token: int) -> set[int]:
    """Blocks with the request's tokens from `first_token` on, of all groups, without vLLM's null block."""
    skipped = first_token // scheduler.block_size
    groups = scheduler.kv_cache_manager.get_block_ids(engine_request_id)
    null_id = scheduler.kv_cache_manager.block_pool.null_block.block_id
    return {block for blocks in groups for block in blocks[skipped:] if block != null_id}
