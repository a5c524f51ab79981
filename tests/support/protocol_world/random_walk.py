"""Orders of steps, drawn at random: one to its end, or as many as it takes to meet every kind of step.

The same seed leads to the same steps, in any process: nothing here may depend on the order of a set, on the
address of an object, or on the time.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from tests.support.protocol_world.config import Config
from tests.support.protocol_world.explore import MAX_DEPTH, BrokenError
from tests.support.protocol_world.transfers.world import new_world
from tests.support.protocol_world.world import World

MAX_STEPS = 4 * MAX_DEPTH  # a full store is asked again and again
MIN_TAKEN = 10  # times that the walks of a test take every kind of step
MAX_WALKS = 160  # for one kind, or of each system that leads to rare ones
FAULT_SHARE = 0.3  # of walks for one kind of fault


def walk(config: Config, seed: int, fault_share: float = 0.03, slow: str = "") -> World:
    """The world at its end.

    Args:
        fault_share: how often a fault comes instead of a usual step.
        slow: a party that goes on only when no other can.

    Raises:
        BrokenError: something that must not happen.
    """
    chance = random.Random(seed)
    world = new_world(config)
    try:
        while len(world.path) < MAX_STEPS:
            enabled = world.enabled()
            usual = [each for each in enabled if not each.is_fault]
            faults = [each for each in enabled if each.is_fault]
            if not usual:
                world.check_quiet()
                return world
            others = (
                [each for each in usual if slow not in (each.key.subject, each.key.what)] if slow else usual
            )
            chosen = chance.choice(others or usual)
            if faults and chance.random() < fault_share:
                kind = chance.choice(sorted({each.key.kind for each in faults}))
                chosen = chance.choice([each for each in faults if each.key.kind == kind])
            world.take(chosen.key)
            world.check()
        raise AssertionError("it never ends")
    except Exception as error:
        raise BrokenError(config, world.path, f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        world.close()


def take_rare_faults(taken: Counter[str], faults: Iterable[str], systems: Sequence[Config]) -> int:
    """Walks for each of `faults` that `taken` lacks, with that fault alone, until it is met often enough.

    A fault that cannot happen in one of `systems` happens in another: they take turns. What was taken is
    added to `taken`. Returns the number of walks.
    """
    num_walks = 0
    for kind in faults:
        for seed in range(MAX_WALKS):
            if taken[kind] >= MIN_TAKEN:
                break
            config = replace(systems[seed % len(systems)], faults=(kind,), max_faults=9, max_attempts=9)
            taken += walk(config, seed, FAULT_SHARE).coverage
            num_walks += 1
    return num_walks


class RareWalk(NamedTuple):
    """A walk that leads to what is rare: see `walk`."""

    config: Config
    fault_share: float
    slow: str = ""


def take_rare_kinds(taken: Counter[str], walks: Mapping[str, RareWalk]) -> int:
    """Walks until each kind is met often enough, by the walk that leads there. Returns their number."""
    num_walks = 0
    for kind, rare in walks.items():
        for seed in range(MAX_WALKS):
            if taken[kind] >= MIN_TAKEN:
                break
            taken += walk(rare.config, seed, rare.fault_share, rare.slow).coverage
            num_walks += 1
    return num_walks


def take_rare_steps(
    taken: Counter[str], kinds: Iterable[str], rare: Sequence[tuple[Config, float]], min_rounds: int = 0
) -> int:
    """Walks through `rare`, systems with their shares of faults, until `taken` has enough of all `kinds`."""
    num_rounds = 0
    kinds = tuple(kinds)
    while num_rounds < min_rounds or (too_rare(taken, kinds) and num_rounds < MAX_WALKS):
        for config, fault_share in rare:
            taken += walk(config, num_rounds, fault_share).coverage
        num_rounds += 1
    return num_rounds * len(rare)


def too_rare(taken: Counter[str], kinds: Iterable[str]) -> dict[str, int]:
    """Of `kinds`: those that were taken too seldom."""
    return {kind: taken[kind] for kind in kinds if taken[kind] < MIN_TAKEN}
