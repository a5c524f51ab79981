"""A tensor that the worker could not read fails its requests before a token of that step is sent."""

from types import SimpleNamespace
from typing import Any

from tests.support.vllm_connector.fake_engine import fake_request, pinned
from tests.support.vllm_connector.played_engine import IDLE, A, B, Engine
from triptych_vllm_connector.scheduler.failed_loads import LoadsInFlight, undo_failed_loads


class FakeScheduler:
    """vLLM's, as far as `failed_loads` reads it: blocks of each request that runs, one group."""

    block_size = 4

    def __init__(self, blocks: dict[str, list[int]]) -> None:
        self.blocks = blocks
        self.requests = dict(blocks)
        self.kv_cache_manager = self
        cached = [SimpleNamespace(block_hash=f"hash-{number}") for number in range(16)]
        self.block_pool = SimpleNamespace(null_block=SimpleNamespace(block_id=0), blocks=cached)
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks.get(request_id, []),)

    def free(self, request_id: str) -> None:
        """It has ended, or is preempted: its blocks can still be found."""
        del self.blocks[request_id]

    def evict_blocks(self, blocks: set[int]) -> None:
        self.evicted = blocks


def output_of(*request_ids: str, **fields: Any) -> Any:
    """`ModelRunnerOutput` of a step that sampled 10, 11, … for these."""
    output = SimpleNamespace(
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[[10 + index] for index in range(len(request_ids))],
        pooler_output=None,
        prompt_logprobs_dict={},
        prompt_token_id_logprobs_dict={},
    )
    vars(output).update(fields)
    return output


def test_a_failed_load_fails_its_requests_before_a_token_is_sent(engine: Engine) -> None:
    one, other = fake_request("r1", [(A, 4)]), fake_request("r2", [(B, 4)])
    for number, (request, item) in enumerate(((one, A), (other, B))):
        engine.consumer.admit_request(request, 0)
        engine.replies(item, pinned(item, number + 1))
        assert engine.consumer.admit_request(request, 0)
        engine.loads(request, item)
    start = one.mm_features[0].mm_position.offset
    first_block = start // FakeScheduler.block_size
    scheduler = FakeScheduler({"r1": [0, 1, 2, 3], "r2": [0, 5, 6, 7], "r3": [0, 1, 2, 3]})
    output = output_of("r1", "r2", "r3")

    undo_failed_loads(frozenset({A}), engine.consumer, LoadsInFlight(), scheduler, output)

    assert output.sampled_token_ids == [[], [11], []]
    assert scheduler.evicted == set([0, 1, 2, 3][first_block:]) - {0}
    assert engine.consumer.take_failed() == {"r1"}
    engine.consumer.on_item_computed("r1", 0)  # vLLM reports it before it ends the request
    engine.finish(one)
    assert engine.evicted == [A]
    assert "injected" not in [each for each in engine.sender.take_short() if each.endswith("r1")]
    engine.finish(other)
    assert engine.consumer.counts() == IDLE


def load_in_flight(engine: Engine, in_flight: LoadsInFlight) -> Any:
    """A request whose item A is loaded in a step without output; it begins in its first block."""
    request = fake_request("r1", [(A, 4)])
    engine.consumer.admit_request(request, 0)
    engine.replies(A, pinned(A, 1))
    assert engine.consumer.admit_request(request, 0)
    engine.loads(request, A)
    in_flight.on_step_scheduled({A})
    return request


def test_a_request_that_was_preempted_meanwhile_fails_too(engine: Engine) -> None:
    in_flight = LoadsInFlight()
    request = load_in_flight(engine, in_flight)
    scheduler = FakeScheduler({"r1": [1, 2, 3]})
    in_flight.note_departure(request, scheduler)
    scheduler.free("r1")
    engine.consumer.on_preempted("r1")
    output = output_of("r1")

    undo_failed_loads(frozenset({A}), engine.consumer, in_flight, scheduler, output)

    assert scheduler.evicted == {1, 2, 3}
    assert output.sampled_token_ids == [[]]  # dropped even of a preempted request
    assert engine.consumer.take_failed() == {"r1"}


def test_whatever_the_step_made_for_a_failed_request_is_dropped(engine: Engine) -> None:
    in_flight = LoadsInFlight()
    load_in_flight(engine, in_flight)
    output = output_of(
        "r2",
        "r1",
        sampled_token_ids=[],
        pooler_output=["right", "wrong"],
        prompt_logprobs_dict={"r1": "wrong", "r2": "right"},
        prompt_token_id_logprobs_dict={"r1": "wrong"},
    )

    undo_failed_loads(
        frozenset({A}), engine.consumer, in_flight, FakeScheduler({"r1": [1], "r2": [4]}), output
    )

    assert output.pooler_output == ["right", None]
    assert output.prompt_logprobs_dict == {"r2": "right"}
    assert output.prompt_token_id_logprobs_dict == {}


def test_of_a_request_that_runs_on_without_its_view_later_blocks_are_wrong_too(engine: Engine) -> None:
    """vLLM's encoder cache was emptied while the step ran; the next one is scheduled already."""
    in_flight = LoadsInFlight()
    request = load_in_flight(engine, in_flight)
    scheduler = FakeScheduler({"r1": [1, 2]})
    scheduler.block_pool.blocks[2].block_hash = None  # half full
    in_flight.note_departure(request, scheduler)
    scheduler.block_pool.blocks[2].block_hash = "full by now"
    scheduler.blocks["r1"].append(3)

    undo_failed_loads(frozenset({A}), engine.consumer, in_flight, scheduler, output_of("r1"))

    assert scheduler.evicted == {1, 2, 3}
    assert engine.consumer.take_failed() == {"r1"}


def test_departed_requests_are_forgotten_with_the_last_step_that_loads(engine: Engine) -> None:
    in_flight = LoadsInFlight()
    request = load_in_flight(engine, in_flight)
    in_flight.on_step_scheduled({A})
    in_flight.note_departure(request, FakeScheduler({"r1": [1]}))
    in_flight.on_step_output({A})
    assert [each.engine_request_id for each in in_flight.departed_from({A})] == ["r1"]
    in_flight.on_step_output({A})
    assert list(in_flight.departed_from({A})) == []
    in_flight.note_departure(request, FakeScheduler({"r1": [1]}))
    assert list(in_flight.departed_from({A})) == []
