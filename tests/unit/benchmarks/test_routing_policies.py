"""The bench of routing policies without engines: what is asked, what vLLM's counters say, the bars."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from load.client import Answer
from load.contents import TextMaker
from routing_policies.arms import AFFINITY, ARMS, ONE, ROUND_ROBIN
from routing_policies.conversations import FIRST, LATER, Shape, make_conversations
from routing_policies.measuring import ArmResult
from routing_policies.prefix_caches import PrefixCounts, counts_of
from routing_policies.results import bars, failures, table

from triptych_gateway.routing.scheduling.profile_file import read_profiles
from triptych_gateway.routing.scheduling.profiles import BUILT_IN

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


def result(hit_rates: list[float], ttft_ms: list[float], error: str = "") -> ArmResult:
    answers = [
        [Answer(kind, "", 0.0, times=[each / 1000], error=error) for kind in (FIRST, LATER)]
        for each in ttft_ms
    ]
    return ArmResult([PrefixCounts(100.0, 100 * rate) for rate in hit_rates], answers)


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


def test_bars_and_table() -> None:
    found = {
        ONE: result([0.8, 0.6], [100, 100]),
        ROUND_ROBIN: result([0.3, 0.3], [200, 100]),
        AFFINITY: result([0.76, 0.57], [120, 65]),
    }
    assert [(bar.ratio.middle, bar.is_held) for bar in bars(found)] == [
        (pytest.approx(0.95), True),
        (pytest.approx(0.625), True),
    ]
    found[AFFINITY] = result([0.4, 0.4], [200, 100])
    assert [bar.is_held for bar in bars(found)] == [False, False]
    assert bars({AFFINITY: found[AFFINITY]}) == []
    assert table(found).splitlines()[-1].startswith("| `affinity` | 0.40 (0.40 to 0.40) | 150.00")
    assert failures(found) == []
    assert failures({ONE: result([0.5], [1], "503: no")}) == ["one_instance: 503: no"] * 2
