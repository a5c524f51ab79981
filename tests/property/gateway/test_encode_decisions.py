"""The decision on a simulated system: never much worse than the better of always remote and always local.

The gateway's own classes decide and learn from what a gateway sees; encoders, instance and time are
simulated, and every run is the same.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.gateway.decision_world import Asked, Outcome, TrueCosts, World, mean_s
from triptych_gateway.decision.decision_policy import DecisionMode, DecisionReason

NUM_REQUESTS = 350
NUM_LEARNING = 150  # of the first requests: three encodes at the instance must have been tried
NUM_ROWS = 256
WORSE = 1.03

WORLDS = {
    "balanced": TrueCosts(),
    "slow_instance": TrueCosts(local_row_s=0.0012),
    "fast_instance": TrueCosts(local_row_s=0.0003),
    "two_encoders": TrueCosts(num_encoders=2),
    "no_overlap": TrueCosts(overlap=False),
    "large_language_model": TrueCosts(prefill_token_s=0.0015),
}
SATURATED = ("two_encoders", "large_language_model")  # the instance is the bottleneck, either way
HELPED = tuple(world for world in WORLDS if world not in SATURATED)
SWEEP = (0, 1, 4, 16)  # images of a request
MODES: tuple[DecisionMode, ...] = ("remote", "local", "auto")


def arrivals(rate: float, num_images: int | None, seed: int) -> list[Asked]:
    """Poisson; `num_images` None: mixed."""
    chance, at = random.Random(seed), 0.0
    load: list[Asked] = []
    for _ in range(NUM_REQUESTS):
        at += chance.expovariate(rate)
        load.append(Asked(at, chance.choice(SWEEP) if num_images is None else num_images, NUM_ROWS))
    return load


def encoders_rate(costs: TrueCosts, num_images: int) -> float:
    """Requests a second that the encoders can serve."""
    encode_s = costs.encode_base_s + costs.encode_row_s * NUM_ROWS
    return costs.num_encoders / (encode_s * max(num_images, 1))


def played(costs: TrueCosts, mode: DecisionMode, load: Sequence[Asked]) -> list[Outcome]:
    return World(costs, mode).run(load)[NUM_LEARNING:]


def ratio(costs: TrueCosts, rate: float, num_images: int | None) -> float:
    """Mean seconds to the first token over those of the better way; three loads, since each has its luck."""
    ratios = []
    for seed in range(3):
        load = arrivals(rate, num_images, seed)
        remote, local, auto = (mean_s(played(costs, mode, load)) for mode in MODES)
        ratios.append(auto / min(remote, local))
    return sum(ratios) / len(ratios)


@pytest.mark.parametrize("utilization", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("num_images", SWEEP)
@pytest.mark.parametrize("world", HELPED)
def test_a_sweep_from_text_to_sixteen_images(world: str, num_images: int, utilization: float) -> None:
    costs = WORLDS[world]
    assert ratio(costs, utilization * encoders_rate(costs, num_images), num_images) <= WORSE


@pytest.mark.parametrize("num_images", [1, 4, None])
@pytest.mark.parametrize("world", SATURATED)
def test_where_the_instance_has_the_most_work(world: str, num_images: int | None) -> None:
    """It is left alone."""
    costs = WORLDS[world]
    assert ratio(costs, 0.2 * encoders_rate(costs, num_images or 5), num_images) <= WORSE


@pytest.mark.parametrize("utilization", [0.05, 0.5])
@pytest.mark.parametrize("world", HELPED)
def test_mixed_requests(world: str, utilization: float) -> None:
    costs = WORLDS[world]
    assert ratio(costs, utilization * encoders_rate(costs, 5), None) <= WORSE


@pytest.mark.parametrize("num_images", [1, 4])
@pytest.mark.parametrize("world", WORLDS)
def test_saturation(world: str, num_images: int) -> None:
    """Eight clients without a pause: where encoders are the bottleneck, the instance helps."""
    ends: dict[DecisionMode, float] = {}
    for mode in MODES:
        system = World(WORLDS[world], mode)
        system.run([Asked(0.0, num_images, NUM_ROWS)] * NUM_REQUESTS, num_clients=8)
        ends[mode] = system.now
    assert ends["auto"] <= 1.01 * min(ends.values())
    if world not in SATURATED:
        assert ends["auto"] <= 0.93 * min(ends["remote"], ends["local"])


@pytest.mark.parametrize("world", WORLDS)
def test_exploration_is_rare(world: str) -> None:
    costs = WORLDS[world]
    outcomes = World(costs, "auto").run(arrivals(0.05 * encoders_rate(costs, 1), 1, seed=2))
    explored = [each for each in outcomes if each.decision.reason is DecisionReason.EXPLORATION]
    assert len(explored) <= 0.03 * len(outcomes)


def test_it_does_not_flap_on_an_idle_system_at_the_break_even() -> None:
    """Either way takes the same: the one that was chosen stays."""
    costs = TrueCosts(remote_overhead_s=0.0, overlap=False)
    outcomes = played(costs, "auto", [Asked(5.0 * number, 1, NUM_ROWS) for number in range(NUM_REQUESTS)])
    ways = [each.decision.way for each in outcomes if each.decision.reason is not DecisionReason.EXPLORATION]
    assert sum(one is not other for one, other in itertools.pairwise(ways)) <= 2


def test_encoders_that_become_slower_are_helped_and_used_again() -> None:
    """Slower for a while, as by another load on their machine; later requests must find their way back."""
    quick = TrueCosts(local_row_s=0.0009)
    world = World(quick, "auto")
    world.run([Asked(1.0 * number, 1, NUM_ROWS) for number in range(300)])
    world.costs = replace(quick, encode_row_s=0.006)
    slow = world.run([Asked(300.0 + number, 1, NUM_ROWS) for number in range(300)])[500:600]
    assert sum(each.decision.is_local for each in slow) >= 90
    world.costs = quick
    later = world.run([Asked(2000.0 + number, 1, NUM_ROWS) for number in range(300)])[-100:]
    assert sum(each.decision.is_local for each in later) <= 10


@pytest.mark.parametrize("local_row_s", [0.0003, 0.0004, 0.0006, 0.0008])
def test_one_at_a_time_where_compute_is_shared(local_row_s: float) -> None:
    """After a load under which encodes took twice as long. Which way is better depends on the number of
    images, since only the encoders' encodes overlap with prefill."""
    alone = TrueCosts(local_row_s=local_row_s, remote_overhead_s=0.03, shares_compute=True, jitter=0.15)
    means: dict[DecisionMode, dict[int, float]] = {}
    for mode in MODES:
        world = World(replace(alone, encode_row_s=2 * alone.encode_row_s), mode)
        world.run([Asked(0.0, 1, NUM_ROWS)] * 50, num_clients=4)
        world.costs, num_before, at = alone, len(world.outcomes), world.now
        chance = random.Random(1)
        load = [
            Asked(at + 20.0 * number, chance.choice([1, 2, 4, 8, 16]), NUM_ROWS)
            for number in range(2 * NUM_REQUESTS)
        ]
        outcomes = world.run(load)[num_before + NUM_LEARNING :]
        means[mode] = {
            size: mean_s([each for each in outcomes if each.asked.num_images == size])
            for size in (1, 2, 4, 8, 16)
        }
    ratios = [
        means["auto"][size] / min(means["remote"][size], means["local"][size]) for size in means["auto"]
    ]
    assert sum(ratios) / len(ratios) <= WORSE
