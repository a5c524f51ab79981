"""One order of steps, drawn at random, to its end."""

import random

from tests.support.protocol_world.config import Config, Key
from tests.support.protocol_world.explore import MAX_DEPTH, BrokenError
from tests.support.protocol_world.stages.world import new_world
from tests.support.protocol_world.world import World

MAX_STEPS = 4 * MAX_DEPTH  # a full store is asked again and again


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
    path: list[Key] = []
    try:
        while len(path) < MAX_STEPS:
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
            path.append(chosen.key)
            world.take(chosen.key)
            world.check()
        raise AssertionError("it never ends")
    except Exception as error:
        raise BrokenError(config, path, f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        world.close()
