"""Tenants on real engines: what one has left in a cache is not found by another; the answers are equal."""

from types import ModuleType
from typing import Any

import pytest

from tests.support.real.system import Answer, System, image_part
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

ENCODER = "encoder-0"
LEASE_S = 30  # more than the registry keeps a record that is not renewed
# Fills the blocks of the prefix cache that the image stands in.
LONG_QUESTION = {"type": "text", "text": "read the digits " * 60}


def ask(system: System, key: str, content: list[dict[str, Any]]) -> tuple[Answer, set[str]]:
    """The answer, and the stages that it went through."""
    answer = system.ask(content, api_key=key, stream=True)
    spans = system.trace(answer.request_id, "llm_request", "gateway.stream")
    return answer, {span.name for span in spans}


def test_a_prefix_and_an_image_are_found_by_their_tenant_alone(
    with_tower: System, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, seed=61)
    content = [image_part(strip.png), LONG_QUESTION]
    first, _ = ask(with_tower, "alice", content)
    wait_until(lambda: with_tower.store_stats().num_pins == 0, 10, "all pins end")
    sealed = with_tower.store_stats().num_seals_total

    again, stages = ask(with_tower, "anna", content)  # of the same tenant: all of it is in the prefix cache
    assert not [stage for stage in stages if stage.startswith(("encoder.", "prefill.inject"))], stages
    assert with_tower.store_stats().num_seals_total == sealed

    other, _ = ask(with_tower, "bob", content)
    assert with_tower.store_stats().num_seals_total == sealed + 1
    spans = {span.name for span in with_tower.trace(other.request_id, "encoder.encode", "prefill.inject")}
    assert {"encoder.encode", "prefill.inject"} <= spans
    assert first.token_ids == again.token_ids == other.token_ids


def test_raw_images_of_two_tenants_get_the_same_answers(with_tower: System, strips: ModuleType) -> None:
    """prefill_decode encodes them itself, under names that vLLM takes from the gateway."""
    (strip,) = strips.held_out_strips(1, seed=62)
    content = [image_part(strip.png), image_part(strip.png), LONG_QUESTION]
    with with_tower.stopped(ENCODER):
        answers = [ask(with_tower, key, content) for key in ("alice", "bob", "alice")]
    assert all("gateway.local_encode" in stages for _, stages in answers), answers
    wait_until(lambda: ENCODER in with_tower.instances(), LEASE_S, "the encoder is back")
    encoded, stages = ask(with_tower, "anna", content)
    assert "gateway.local_encode" not in stages
    assert [answer.token_ids for answer, _ in answers] == [encoded.token_ids] * 3
