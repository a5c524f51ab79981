"""The transport `redis`, whole system: the same answers, and bytes that are lost are made again."""

from collections.abc import Iterator
from types import ModuleType

import openai
import pytest
import redis

from tests.support.real.roles import Instance
from tests.support.real.system import Server, System, image_part, running_system
from tests.support.waiting import wait_until

pytestmark = pytest.mark.engine

QUESTION = {"type": "text", "text": "read the digits"}


@pytest.fixture(scope="module")
def redis_system() -> Iterator[System]:
    with running_system(TRIPTYCH_TRANSPORT="redis", is_forked=True) as running:
        yield running


@pytest.fixture
def tensors(redis_system: System) -> Iterator[redis.Redis]:
    """The system's own Redis."""
    with redis.Redis(unix_socket_path=str(redis_system.run_dir / "redis.sock")) as client:
        yield client


def keys(client: redis.Redis) -> list[bytes]:
    return list(client.scan_iter("triptych:*:tensor:*"))


def test_answers_equal_those_of_the_default_transport(
    system: Server, redis_system: System, strips: ModuleType
) -> None:
    samples = strips.held_out_strips(6, length=None, seed=31)
    for first, second in zip(samples[::2], samples[1::2], strict=True):
        content = [image_part(first.png), QUESTION, image_part(second.png)]
        assert redis_system.ask(content).token_ids == system.ask(content).token_ids


def test_the_trace_names_the_transport(redis_system: System, system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=32)
    for server, transport in ((redis_system, "redis"), (system, "pinned_shm")):
        answer = server.ask([image_part(strip.png), QUESTION])
        for span in server.trace(answer.request_id, "encoder.write", "prefill.inject"):
            if span.name in ("encoder.write", "prefill.inject"):
                assert span.attributes["triptych.transport"] == transport


def test_the_bytes_are_in_redis_for_a_limited_time(
    redis_system: System, strips: ModuleType, tensors: redis.Redis
) -> None:
    before = set(keys(tensors))
    (strip,) = strips.held_out_strips(1, seed=33)
    redis_system.ask([image_part(strip.png), QUESTION])
    (new,) = set(keys(tensors)) - before
    assert 0 < tensors.ttl(new) <= 600
    wait_until(lambda: redis_system.store_stats().num_pins == 0, 10, "all pins end")


def test_bytes_that_redis_lost_are_made_again(
    redis_system: System, strips: ModuleType, tensors: redis.Redis
) -> None:
    (strip,) = strips.held_out_strips(1, seed=34)
    first = redis_system.ask([image_part(strip.png), QUESTION])
    wait_until(lambda: redis_system.store_stats().num_pins == 0, 10, "all pins end")
    tensors.delete(*keys(tensors))
    again = redis_system.ask([image_part(strip.png), {"type": "text", "text": "What digits are these?"}])
    assert "encoder.encode" in {span.name for span in redis_system.trace(again.request_id, "encoder.encode")}
    assert again.text.split() == first.text.split()
    stats = redis_system.store_stats()
    assert stats.num_watches == 0


def test_a_tensor_that_cannot_be_read_fails_its_request_and_nothing_else(
    redis_system: System, strips: ModuleType, tensors: redis.Redis
) -> None:
    """Redis reports that it has the bytes, and refuses them when the engine's step needs them."""
    (strip,) = strips.held_out_strips(1, seed=35)
    first = redis_system.ask([image_part(strip.png), QUESTION])
    content = [{"type": "text", "text": "What digits are these?"}, image_part(strip.png)]
    tensors.execute_command("ACL", "SETUSER", "default", "-get")
    try:
        with pytest.raises(openai.InternalServerError):
            redis_system.ask(content)
    finally:
        tensors.execute_command("ACL", "SETUSER", "default", "+get")
    instance = Instance.of(redis_system, "prefill_decode-0")
    failed = "triptych_prefill_decode_failed_loads_total"
    wait_until(lambda: instance.metric(failed) > 0, 10, "the failed load is counted")
    again = redis_system.ask(content)  # not from what the failed step left in the prefix cache
    assert again.text.split() == first.text.split()
    assert "prefill.inject" in {
        span.name for span in redis_system.trace(again.request_id, "prefill.inject", "llm_request")
    }
    wait_until(lambda: redis_system.store_stats().num_pins == 0, 10, "all pins end")


def test_status_names_the_transport_of_the_pair(redis_system: System, strips: ModuleType) -> None:
    (strip,) = strips.held_out_strips(1, seed=36)
    redis_system.ask([image_part(strip.png), QUESTION])
    rows = [line.split() for line in redis_system.command("status").stdout.splitlines()]
    (pair,) = [row for row in rows if row[:2] == ["encoder-0", "prefill_decode-0"]]
    assert pair[2] == "redis"
    assert int(pair[3]) >= 1
