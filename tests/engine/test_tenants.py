"""Tenants on real engines: what one has left in a cache is not found by another; the answers are equal."""

import hashlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.system import EXACT, Answer, System, image_part, running_system, wait_until

pytestmark = pytest.mark.engine

ENCODER = "encoder-0"
LEASE_S = 30  # more than the registry keeps a record that nobody renews
# Fills the blocks of the prefix cache that the image stands in.
LONG_QUESTION = {"type": "text", "text": "read the digits " * 60}
TENANTS = {"alice": "red", "anna": "red", "bob": "blue"}


@pytest.fixture(scope="module")
def with_tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    keys = tmp_path_factory.mktemp("tenants") / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(
        "".join(
            f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
            f'tenant = "{tenant}"\n'
            for name, tenant in TENANTS.items()
        )
    )
    options = " ".join(EXACT)
    with running_system(
        f"--encoder-args={options}",
        f"--prefill-decode-args={options}",
        TRIPTYCH_API_KEYS_FILE=str(keys),
        TRIPTYCH_LOCAL_ENCODE="fallback",
        TRIPTYCH_LOCAL_ENCODE_AFTER_S="2",
        TRIPTYCH_ENCODER_GRACE_S="1",
    ) as running:
        yield running


def ask(system: System, key: str, content: list[dict[str, Any]]) -> tuple[Answer, set[str]]:
    """The answer, and the stages that it went through."""
    answer = system.ask(content, api_key=key, stream=True)
    spans = system.trace(answer.request_id, "llm_request", "gateway.stream")
    return answer, {span.name for span in spans}


def test_a_prefix_and_an_image_are_found_by_their_tenant_alone(
    with_tenants: System, strips: ModuleType
) -> None:
    (strip,) = strips.held_out_strips(1, seed=61)
    content = [image_part(strip.png), LONG_QUESTION]
    first, _ = ask(with_tenants, "alice", content)
    wait_until(lambda: with_tenants.store_stats().num_pins == 0, 10, "all pins end")
    sealed = with_tenants.store_stats().num_seals_total

    again, stages = ask(with_tenants, "anna", content)  # of the same tenant: all of it is in the prefix cache
    assert not [stage for stage in stages if stage.startswith(("encoder.", "prefill.inject"))], stages
    assert with_tenants.store_stats().num_seals_total == sealed

    other, _ = ask(with_tenants, "bob", content)
    assert with_tenants.store_stats().num_seals_total == sealed + 1
    spans = {span.name for span in with_tenants.trace(other.request_id, "encoder.encode", "prefill.inject")}
    assert {"encoder.encode", "prefill.inject"} <= spans
    assert first.token_ids == again.token_ids == other.token_ids


def test_raw_images_of_two_tenants_get_the_same_answers(with_tenants: System, strips: ModuleType) -> None:
    """prefill_decode encodes them itself, under names that vLLM takes from the gateway."""
    (strip,) = strips.held_out_strips(1, seed=62)
    content = [image_part(strip.png), image_part(strip.png), LONG_QUESTION]
    with with_tenants.stopped(ENCODER):
        answers = [ask(with_tenants, key, content) for key in ("alice", "bob", "alice")]
    assert all("gateway.local_encode" in stages for _, stages in answers), answers
    wait_until(lambda: ENCODER in with_tenants.instances(), LEASE_S, "the encoder is back")
    encoded, stages = ask(with_tenants, "anna", content)
    assert "gateway.local_encode" not in stages
    assert [answer.token_ids for answer, _ in answers] == [encoded.token_ids] * 3
