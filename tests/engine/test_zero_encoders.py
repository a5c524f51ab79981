"""Encoders on demand with real engines: a request starts the first one, and outlives the end of the last."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from tests.support.real.system import System, image_part, running_system

pytestmark = pytest.mark.engine

NUM_ROUNDS = 2


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system("--encoders=0..1", is_forked=True) as running:
        yield running


def states(system: System) -> list[str]:
    return [each["state"] for name, each in system.services().items() if name.startswith("encoder")]


def test_a_request_starts_the_first_encoder_and_outlives_the_last(system: System, strips: ModuleType) -> None:
    assert states(system) == ["stopped"]
    pictures = iter(strips.held_out_strips(2 * NUM_ROUNDS, seed=33))
    for number in range(NUM_ROUNDS):
        content = [image_part(next(pictures).png), {"type": "text", "text": "read the digits"}]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(system.ask, content, stream=True)
            assert system.ask([{"type": "text", "text": f"say {number}"}]).token_ids, "text does not wait"
            first = asked.result()
        again = system.ask(content)
        assert first.token_ids == again.token_ids
        assert states(system) == ["ready"]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                system.ask, [image_part(next(pictures).png), {"type": "text", "text": "read the digits"}]
            )
            assert system.command("stop", "encoder-0").returncode == 0
            assert asked.result().token_ids, "by the encoder that leaves, or by the next one"
        assert system.command("scale", "encoder", "0").returncode == 0
        assert states(system) == ["stopped"]
        assert system.command("scale", "encoder", "0..1").returncode == 0
