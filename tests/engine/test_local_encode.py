"""No encoder answers: prefill_decode encodes itself, and the answers are the same."""

from types import ModuleType

import pytest

from tests.support.real.gateways import another_gateway
from tests.support.real.system import Server, System, image_part
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}
ENCODER = "encoder-0"
LEASE_S = 30  # more than the registry keeps a record that is not renewed


def names(system: System, request_id: str, *expected: str) -> set[str]:
    return {span.name for span in system.trace(request_id, *expected)}


def test_with_an_encoder_nothing_is_encoded_here(with_tower: System, strips: ModuleType) -> None:
    """One namespace, with the tower and without: else no encoder could serve this instance."""
    instances = with_tower.instances()
    assert instances["prefill_decode-0"]["role"] == "encode-prefill-decode"
    assert instances["prefill_decode-0"]["namespace_digest"] == instances[ENCODER]["namespace_digest"]
    (strip,) = strips.held_out_strips(1, seed=51)
    answer = with_tower.ask([image_part(strip.png), QUESTION])
    spans = names(with_tower, answer.request_id, "encoder.encode", "prefill.inject")
    assert "gateway.local_encode" not in spans


def test_the_answers_are_those_of_a_monolith(
    with_tower: System, monolith: Server, strips: ModuleType
) -> None:
    """First while the encoder hangs, and still holds the job; then when it is missed in the registry."""
    images = [image_part(strip.png) for strip in strips.held_out_strips(8, length=None, seed=52)]
    contents = [
        [QUESTION, images[0]],
        [images[1], QUESTION, images[2]],
        [images[3], images[4], QUESTION],
        [QUESTION, images[5], images[5]],
    ]
    expected = [monolith.ask(content) for content in contents]
    with with_tower.stopped(ENCODER):
        late = with_tower.ask(contents[0], stream=True)
        assert "gateway.local_encode" in names(with_tower, late.request_id, "gateway.first_token")
        wait_until(lambda: ENCODER not in with_tower.instances(), LEASE_S, "the encoder is missed")
        answers = [with_tower.ask(content, stream=stream) for content in contents for stream in (False, True)]
        spans = names(with_tower, answers[-1].request_id, "gateway.local_encode", "llm_request")
        assert not [name for name in spans if name.startswith(("encoder.", "prefill.inject"))]
    assert late.token_ids == expected[0].token_ids
    assert [answer.token_ids for answer in answers] == [
        answer.token_ids for answer in expected for _ in range(2)
    ]


def test_what_is_decided_local_asks_no_encoder(
    with_tower: System, monolith: Server, strips: ModuleType
) -> None:
    """The encoder is there, and gets no job; the answers are the same."""
    images = [image_part(strip.png) for strip in strips.held_out_strips(3, length=None, seed=54)]
    contents = [[QUESTION, images[0]], [images[1], QUESTION, images[2]]]
    expected = [monolith.ask(content) for content in contents]
    with another_gateway(with_tower, "gateway-local", TRIPTYCH_ENCODE_DECISION="local") as gateway:
        answers = [gateway.ask(content, stream=stream) for content in contents for stream in (False, True)]
        spans = gateway.trace(answers[-1].request_id, "gateway.local_encode", "llm_request")
    assert [answer.token_ids for answer in answers] == [
        answer.token_ids for answer in expected for _ in range(2)
    ]
    assert not [span for span in spans if span.name.startswith(("encoder.", "queue.", "prefill.inject"))]
    (root,) = [span for span in spans if span.is_root]
    assert (root.attributes["triptych.decision"], root.attributes["triptych.decision_reason"]) == (
        "local",
        "forced",
    )


def test_the_encoder_is_used_again_when_it_is_back(with_tower: System, strips: ModuleType) -> None:
    wait_until(lambda: ENCODER in with_tower.instances(), LEASE_S, "the encoder is back")
    (strip,) = strips.held_out_strips(1, seed=53)
    answer = with_tower.ask([image_part(strip.png), QUESTION])
    assert "gateway.local_encode" not in names(with_tower, answer.request_id, "encoder.encode")
    wait_until(lambda: with_tower.store_stats().num_pins == 0, 10, "all pins end")
