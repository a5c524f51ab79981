"""The bench of routing policies without engines: what is asked, what vLLM's counters say, the bars."""

from pathlib import Path

import pytest
from load.contents import TextMaker
from routing_policies.arms import AFFINITY, ARMS
from routing_policies.conversations import FIRST, LATER, Shape, make_conversations
from routing_policies.prefix_caches import PrefixCounts, counts_of

from triptych_gateway.routing.scheduling.profiles import BUILT_IN, read_profiles

TEXTS = TextMaker(Path(__file__).resolve().parents[3] / "models" / "digits-vl")
SCRAPE = """# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 300.0
# TYPE vllm:prefix_cache_queries_created gauge
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 60.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
"""


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_file_that_a_gateway_takes(arm: str) -> None:
    assert (read_profiles(ARMS[arm]) == BUILT_IN) == (arm == AFFINITY)


def test_conversations_share_images_and_a_beginning() -> None:
    shape = Shape(num_conversations=4, num_images=2, num_turns=3)
    talks = make_conversations(TEXTS, 32, shape, 1, "0/affinity")
    turns = [[talk.next_question() for _ in range(4)] for talk in talks]
    assert all(each[3] is None for each in turns), "they end"
    first, second, third = (
        [dict(talk[number].messages[1]) for talk in turns if talk[number]] for number in range(3)
    )
    assert first == second == third
    images = [each["content"][0] for each in first]
    assert images[0] == images[2] != images[1] == images[3]
    assert len({each["content"][1]["text"] for each in first}) == 4
    assert [each.kind for each in turns[0] if each] == [FIRST, LATER, LATER]
    again = make_conversations(TEXTS, 32, shape, 1, "0/affinity")[0].next_question()
    other = make_conversations(TEXTS, 32, shape, 1, "1/affinity")[0].next_question()
    assert again == turns[0][0] != other


def test_vllms_counters() -> None:
    counts = counts_of(SCRAPE)
    assert counts == PrefixCounts(300.0, 60.0)
    assert counts.since(PrefixCounts(100.0, 10.0)).hit_rate == 0.25
