"""Engines of two ranks: the answers are those of an engine of one."""

import shlex
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.support.real.system import EXACT, Server, System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

TEXT = {"type": "text", "text": "read the digits"}
TWO_RANKS = shlex.join([*EXACT, "--tensor-parallel-size=2"])


@pytest.fixture(scope="module")
def of_two_ranks() -> Iterator[System]:
    with running_system(f"--encoder-args={TWO_RANKS}", f"--prefill-decode-args={TWO_RANKS}") as running:
        yield running


def test_answers_are_those_of_one_rank(of_two_ranks: System, monolith: Server, strips: ModuleType) -> None:
    images = [image_part(strip.png) for strip in strips.held_out_strips(6, length=None, seed=880)]
    contents = [
        [TEXT, images[0]],
        [images[1], TEXT, images[2]],
        [images[3], images[3], TEXT],
        [TEXT, images[4], TEXT, images[5], TEXT],
    ]
    for content in contents:
        for stream in (False, True):
            got = of_two_ranks.ask(content, stream=stream)
            wanted = monolith.ask(content, stream=stream)
            assert got.token_ids == wanted.token_ids, f"got {got.text!r}, wanted {wanted.text!r}"
    wait_until(lambda: of_two_ranks.store_stats().num_pins == 0, 10, "all pins end")
