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
MAX_WALKS = 1000  # for one kind of step
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


class RareWalk(NamedTuple):
    """A walk that leads to what is rare: see `walk`."""

    config: Config
    fault_share: float
    slow: str = ""


def after(config: Config, *faults: str) -> Config:
    """The system with many of these faults, and with attempts for all of them."""
    return replace(config, faults=faults, max_faults=9, max_attempts=9)


def of_faults(faults: Iterable[str], systems: Sequence[Config]) -> dict[str, list[RareWalk]]:
    """Return for each fault the walks with that fault alone, through each of `systems`."""
    return {kind: [RareWalk(after(config, kind), FAULT_SHARE) for config in systems] for kind in faults}


def take_every_kind(
    kinds: Iterable[str],
    systems: Iterable[Config],
    faults: tuple[str, ...],
    num_walks: int,
    rare: Mapping[str, Sequence[RareWalk]],
) -> None:
    """Random orders with up to six of `faults`; then, for each kind that was met seldom, `rare` ones.

    Raises:
        AssertionError: a kind of step was met too seldom all the same.
        BrokenError: something that must not happen.
    """
    taken: Counter[str] = Counter()
    for config in systems:
        for seed in range(num_walks):
            taken += walk(replace(config, faults=faults, max_faults=6), seed, 0.06).coverage
    for kind, walks in rare.items():
        for number in range(MAX_WALKS):
            if taken[kind] >= MIN_TAKEN:
                break
            config, fault_share, slow = walks[number % len(walks)]
            taken += walk(config, number // len(walks), fault_share, slow).coverage
    seldom = {kind: taken[kind] for kind in kinds if taken[kind] < MIN_TAKEN}
    assert not seldom, seldom
