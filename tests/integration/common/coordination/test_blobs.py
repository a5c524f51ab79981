"""Tensors in a real Redis: they come back unchanged, for a limited time; every fault is reported in time."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis
import torch
from redis.client import Pipeline

from tests.conftest import EmbeddedRedis
from triptych_common.coordination import BlobMissingError, BlobStore
from triptych_common.coordination.tensor_blobs import MAX_BLOB_BYTES, TTL_S
from triptych_common.domain.errors import BusRefusedError, BusUnavailableError, ItemTooLargeError
from triptych_common.protocol.store import Descriptor
from triptych_common.region.tensor_view import tensor_spec
from triptych_vllm_connector.readable import Readable
from triptych_vllm_connector.slab_probe import SlabProbeResult, UsableSlab
from triptych_vllm_connector.step_orders import WriteOrder
from triptych_vllm_connector.worker.transports import RedisReader, RedisWriter

HASH = "ab" * 32


@pytest.fixture
def blobs(redis_url: str) -> Iterator[BlobStore]:
    blobs = BlobStore(redis_url, "blobs", client_name="test")
    yield blobs
    raw_of(blobs).flushdb()
    blobs.close()


def raw_of(blobs: BlobStore) -> redis.Redis:
    return blobs._clients.client_of("any")


def order(tensor: torch.Tensor, offset: int = 65536) -> tuple[WriteOrder, Descriptor]:
    spec = tensor_spec(tensor)
    written = WriteOrder(HASH, "job", 1, offset, *spec.shape, spec.dtype, None, generation=3, memory="redis")
    return written, Descriptor(mm_hash=HASH, spec=spec, offset=offset, generation=3, memory="redis")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_comes_back_as_it_was(blobs: BlobStore, dtype: torch.dtype) -> None:
    tensor = torch.randn(48, 33).to(dtype).t()
    place, descriptor = order(tensor)
    released: list[bool] = []
    RedisWriter(blobs).write(place, tensor)
    assert Readable(UsableSlab(), blobs)(descriptor)
    read = RedisReader(blobs, "cpu").open(descriptor, lambda: released.append(True))
    assert torch.equal(read, tensor)
    assert released == [True]
    (key,) = raw_of(blobs).keys()
    assert 0 < raw_of(blobs).ttl(key) <= TTL_S


def test_another_reservation_has_another_place(blobs: BlobStore) -> None:
    tensor = torch.ones(2, 2)
    RedisWriter(blobs).write(order(tensor)[0], tensor)
    _, elsewhere = order(tensor, offset=0)
    assert not Readable(UsableSlab(), blobs)(elsewhere)
    with pytest.raises(BlobMissingError):
        RedisReader(blobs, "cpu").open(elsewhere, lambda: None)


def test_bytes_that_are_cut_off_do_not_count(blobs: BlobStore) -> None:
    tensor = torch.ones(2, 2)
    place, descriptor = order(tensor)
    RedisWriter(blobs).write(place, tensor)
    (key,) = raw_of(blobs).keys()
    raw_of(blobs).set(key, b"short")
    assert not Readable(UsableSlab(), blobs)(descriptor)
    with pytest.raises(BlobMissingError):
        RedisReader(blobs, "cpu").open(descriptor, lambda: None)


def test_what_is_too_large_is_refused_before_it_is_sent(blobs: BlobStore) -> None:
    class Large:
        nbytes = MAX_BLOB_BYTES + 1

    with pytest.raises(ItemTooLargeError):
        blobs.put("place", Large())


def test_without_redis_everything_ends_soon() -> None:
    blobs = BlobStore("redis://127.0.0.1:9/0", "blobs", client_name="test")
    start = time.monotonic()
    for call in (
        lambda: blobs.get("p", 1),
        lambda: blobs.renew_tensor("p", 1),
        lambda: blobs.put("p", memoryview(b"x")),
    ):
        with pytest.raises(BusUnavailableError):
            call()
    assert time.monotonic() - start < 14
    blobs.close()


def test_a_redis_that_is_full_or_refuses_us_raises_its_reason(own_redis: EmbeddedRedis) -> None:
    blobs = BlobStore(own_redis.url, "blobs", client_name="test")
    blobs.put("p", memoryview(b"x"))
    raw_of(blobs).config_set("maxmemory", "1")
    with pytest.raises(BusUnavailableError, match="put tensor: Redis is out of memory"):
        blobs.put("q", memoryview(b"x"))
    assert blobs.get("p", 1) == b"x"
    raw_of(blobs).config_set("requirepass", "secret")
    blobs.close()
    with pytest.raises(BusRefusedError, match="asks for a password"):
        blobs.get("p", 1)


def test_only_a_slab_that_the_worker_has_read_can_be_read(blobs: BlobStore) -> None:
    _, descriptor = order(torch.ones(2, 2))
    gpu, generation = "GPU-00000000-0000-0000-0000-00000000000a", descriptor.generation
    in_slab = descriptor.model_copy(update={"memory": f"cuda:{gpu}"})
    slab = UsableSlab()
    can_read = Readable(slab, blobs)
    assert not can_read(in_slab)
    for result, expected in (
        (SlabProbeResult(gpu, generation), True),
        (SlabProbeResult(gpu, generation - 1), False),
        (SlabProbeResult(gpu[:-1] + "b", generation), False),
        (SlabProbeResult(gpu, generation, "cudaIpcOpenMemHandle: invalid device context"), False),
    ):
        slab.set_result(result)
        assert can_read(in_slab) == expected, result
        assert can_read(descriptor.model_copy(update={"memory": "shm"}))


def test_an_order_of_an_earlier_store_writes_where_no_later_one_reads(blobs: BlobStore) -> None:
    """Offsets are the same again, so that another item may have the place: its bytes stay as they are."""
    place, descriptor = order(torch.ones(2, 2))
    RedisWriter(blobs).write(place, torch.ones(2, 2))
    RedisWriter(blobs).write(replace(place, generation=place.generation - 1), torch.zeros(2, 2))
    RedisWriter(blobs).write(replace(place, mm_hash="cd" * 32), torch.zeros(2, 2))
    assert RedisReader(blobs, "cpu").open(descriptor, lambda: None).all()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_connection_that_breaks_under_a_command_is_made_anew_once(
    blobs: BlobStore, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    blobs.put("p", memoryview(b"x"))
    send, left = Pipeline._execute_pipeline, list(range(num_failures))

    def flaky(*args: Any) -> Any:
        if left:
            left.pop()
            raise redis.exceptions.ConnectionError("cut")
        return send(*args)

    monkeypatch.setattr(Pipeline, "_execute_pipeline", flaky)
    if num_failures == 1:
        assert blobs.renew_tensor("p", 1)
    else:
        with pytest.raises(BusUnavailableError):
            blobs.renew_tensor("p", 1)
