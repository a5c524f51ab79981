"""PrefixMemory: what was sent is known, within a bound; the ends of old prompts go first."""

import random

from tests.support.gateway.routing import prompt
from triptych_gateway.routing.scheduling.instance_state import BYTES_PER_TOKEN, PrefixMemory

CHANCE = random.Random(2)
FIRST, SECOND, THIRD = (CHANCE.randbytes(4096) for _ in range(3))


def test_what_was_sent_is_known_from_the_beginning() -> None:
    memory, asked = PrefixMemory(), prompt(FIRST, SECOND)
    assert memory.share_of(asked) == 0.0
    memory.remember(prompt(FIRST).blocks)
    assert 0.45 < memory.share_of(asked) <= 0.5
    memory.remember(asked.blocks)
    assert 0.9 < memory.share_of(asked) <= 1.0
    assert memory.share_of(prompt(SECOND)) == 0.0, "a text elsewhere is no prefix"
    assert memory.share_of(prompt()) == 0.0
    memory.clear()
    assert memory.share_of(asked) == 0.0
    assert len(memory) == 0


def test_the_announced_cache_bounds_it_and_ends_go_before_beginnings() -> None:
    memory = PrefixMemory()
    memory.set_capacity(6144 // BYTES_PER_TOKEN)
    memory.remember(prompt(FIRST).blocks)
    memory.remember(prompt(SECOND).blocks)
    assert memory.share_of(prompt(SECOND)) > 0.9
    assert 0.2 < memory.share_of(prompt(FIRST)) < 0.6, "its first half is there"
    memory.set_capacity(1024 // BYTES_PER_TOKEN)
    assert memory.share_of(prompt(FIRST)) == 0.0
    assert 0.1 < memory.share_of(prompt(SECOND)) < 0.3


def test_what_is_used_again_stays() -> None:
    memory = PrefixMemory()
    memory.set_capacity(2 * 4096 // BYTES_PER_TOKEN)
    for text in (FIRST, SECOND, FIRST, THIRD):
        memory.remember(prompt(text).blocks)
    assert memory.share_of(prompt(FIRST)) > 0.9
    assert memory.share_of(prompt(SECOND)) < 0.2


def test_the_number_of_blocks_is_bounded_whatever_an_instance_announces() -> None:
    memory = PrefixMemory(max_blocks=10)
    memory.set_capacity(10**9)
    memory.remember(prompt(FIRST).blocks)
    assert len(memory) == 10
    assert memory.share_of(prompt(FIRST)) > 0.2
