"""An encode job and the store: full, evicting, refusing, sealed by another encoder."""

import asyncio

import pytest
import tenacity

from tests.support.encoder.encoder_bench import HASH, Bench, delivery_of
from tests.support.waiting import until
from triptych_common.domain.errors import ItemTooLargeError, StoreError, StoreFullError
from triptych_common.protocol.messages import FailureKind
from triptych_encoder.jobs import job_runner

FULL = StoreFullError("full", "")


@pytest.fixture(autouse=True)
def _short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_runner, "FIRST_RETRY_S", 0.001)


async def test_a_grant_that_comes_while_the_store_is_full_opens_its_reserve(bench: Bench) -> None:
    bench.store_client.answers = [FULL, FULL]
    tries = bench.store_client.may_use_reserve
    task = asyncio.ensure_future(bench.run(delivery_of()))
    while len(tries) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    bench.ledger.add_grant(HASH, ("req-1", 0))
    await task
    assert tries == [False, False, True]


@pytest.mark.parametrize(("attempt", "longest_s"), [(1, 0.001), (5, 0.016), (100, 0.5)])
def test_two_encoders_do_not_try_again_in_step(attempt: int, longest_s: float) -> None:
    state = tenacity.RetryCallState(tenacity.AsyncRetrying(), None, (), {})
    state.attempt_number = attempt
    waits = {job_runner.wait_for_space(state, 0.5) for _ in range(10)}
    assert len(waits) > 1
    assert all(job_runner.FIRST_RETRY_S / 2 <= each <= longest_s for each in waits)


async def test_an_entry_evicted_before_it_could_be_pinned_is_encoded(bench: Bench) -> None:
    bench.store_client.answers = ["already sealed"]
    await bench.run(delivery_of())
    assert len(bench.engine.orders) == 1
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]


async def test_an_entry_that_is_evicted_again_and_again_fails_the_job(bench: Bench) -> None:
    bench.store_client.answers = ["already sealed"] * 100
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.STORE_FULL]
    assert bench.store_client.unwatched == [(HASH, None)]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ItemTooLargeError("too_large", ""), FailureKind.TOO_LARGE),
        (StoreError("internal", "secret path"), FailureKind.ENCODER_ERROR),
    ],
)
async def test_a_store_that_refuses(bench: Bench, error: StoreError, kind: FailureKind) -> None:
    bench.store_client.answers = [error]
    delivery = delivery_of()
    await bench.run(delivery)
    assert bench.reporter.kinds == [kind]
    assert "secret" not in bench.reporter.sent[0][2]
    assert delivery.num_acks == 1
    assert bench.engine.orders == []
    assert len(bench.ledger) == 0


async def test_an_item_that_another_encoder_sealed_since_we_reserved_is_not_encoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = bench.store_client.watch_item

    async def sealed_before(mm_hash: str, timeout_s: float) -> "asyncio.Future[int]":
        bench.store_client.is_sealed = True
        return await watch(mm_hash, timeout_s)

    monkeypatch.setattr(bench.store_client, "watch_item", sealed_before)
    await bench.run(delivery_of())
    assert bench.engine.orders == []
    assert bench.store_client.cancelled == [1]
    assert bench.reporter.kinds == ["EncoderCacheMetadata", "EncodeCompleted"]
    assert bench.reporter.sent[0].sealed
    assert bench.ledger.remove_requesters(HASH, {("req-1", 0)}) == [1]


async def test_a_watch_that_fails_gives_the_reservation_back(bench: Bench) -> None:
    bench.store_client.watch_error = StoreError("unavailable", "gone")
    await bench.run(delivery_of())
    assert bench.reporter.kinds == [FailureKind.ENCODER_ERROR]
    assert bench.store_client.unwatched == [(HASH, 1)]


async def test_a_job_that_is_cancelled_while_the_store_is_full_is_handed_back(bench: Bench) -> None:
    bench.store_client.answers = [FULL] * 1000
    delivery = delivery_of()
    task = asyncio.ensure_future(bench.run(delivery))
    await until(lambda: len(bench.store_client.may_use_reserve) >= 3)
    assert not bench.runner.has_blocks(delivery)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (delivery.num_acks, delivery.num_hand_backs, len(bench.ledger)) == (0, 1, 0)
