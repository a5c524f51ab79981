"""A tensor that the worker could not have fails its requests before a token of that step is told."""

from types import SimpleNamespace

from support.fake_engine import fake_request, pinned
from support.played_engine import IDLE, A, B, Engine

from triptych_vllm_connector.lost_loads import undo


class FakeScheduler:
    """vLLM's, as far as `lost_loads.undo` looks: blocks of each request that runs, one group."""

    block_size = 4

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks = blocks
        self.running = [SimpleNamespace(request_id=request_id) for request_id in blocks]
        self.kv_cache_manager = self
        self.block_pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0))
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks[request_id],)

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted = blocks


def test_a_lost_load_fails_who_waits_for_it_before_a_token_is_told(engine: Engine) -> None:
    one, other = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    for number, (request, item) in enumerate(((one, A), (other, B))):
        engine.consumer.admit(request, 0)
        engine.replies(item, pinned(item, number + 1))
        assert engine.consumer.admit(request, 0)
        engine.loads(request, item)
    start = one.mm_features[0].mm_position.offset
    first_block = start // FakeScheduler.block_size
    scheduler = FakeScheduler({"r1": [0, 1, 2, 3], "r2": [0, 5, 6, 7], "r3": [0, 1, 2, 3]})
    output = SimpleNamespace(
        req_id_to_index={"r1": 0, "r2": 1, "r3": 2}, sampled_token_ids=[[11], [12], [13]]
    )

    undo(frozenset({A}), engine.consumer, scheduler, output)

    assert output.sampled_token_ids == [[], [12], []]
    assert scheduler.evicted == set([0, 1, 2, 3][first_block:]) - {0}
    assert engine.consumer.take_failed() == {"r1"}
    engine.consumer.computed("r1", 0)  # vLLM's word, before it ends the request
    engine.finish(one)
    assert engine.evicted == [A]
    assert "injected" not in [word for word in engine.talk.words() if word.endswith("r1")]
    engine.finish(other)
    assert engine.consumer.counts() == IDLE
