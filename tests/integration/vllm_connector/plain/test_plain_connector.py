"""What vLLM asks of an EC connector, with a real store between two engines.

The behaviours are those that vLLM's own tests ask of its example connector, and the store's beside them.
"""

import contextlib
import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.plain_engine import (
    PlainEngine,
    output_of,
    plain_request,
)
from tests.support.waiting import wait_until
from triptych_common.domain.errors import StoreFullError
from triptych_common.protocol.store import Evict, Reserve, TensorSpec

# Modules of torch that vLLM imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MakeEngine = Callable[..., PlainEngine]


@contextlib.contextmanager
def stopped(store: StoreProcess) -> Iterator[None]:
    """The store hangs."""
    os.kill(store.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(store.pid, signal.SIGCONT)


def assert_loaded(engine: PlainEngine, *identifiers: str) -> None:
    for identifier in identifiers:
        assert torch.equal(engine.encoder_cache[identifier], output_of(identifier))


# ---- as vLLM's tests of its example connector ----------------------------------------------------
def test_what_a_producer_saves_every_engine_has(encoder: PlainEngine, consumer: PlainEngine) -> None:
    assert encoder.serve(plain_request("r", "a", "b", "c")) == ["a", "b", "c"]
    for engine in (encoder, consumer):
        assert [engine.scheduler.has_cache_item(each) for each in "abc"] == [True] * 3


def test_one_item_of_three(encoder: PlainEngine, consumer: PlainEngine) -> None:
    encoder.serve(plain_request("r", "b"))
    assert [consumer.scheduler.has_cache_item(each) for each in "abc"] == [False, True, False]
    assert consumer.serve(plain_request("s", "a", "b", "c")) == ["a", "c"]
    assert_loaded(consumer, "a", "b", "c")


def test_a_consumer_saves_nothing(store: StoreProcess, consumer: PlainEngine) -> None:
    assert consumer.serve(plain_request("r", "a")) == ["a"]
    assert not consumer.scheduler.has_cache_item("a")
    assert store.stats().num_seals_total == 0


def test_the_steps_metadata_travels_between_processes(encoder: PlainEngine, consumer: PlainEngine) -> None:
    encoder.serve(plain_request("r", "a"))
    planned = consumer.plan(plain_request("s", "a"))
    assert planned is not None
    consumer.run(pickle.loads(pickle.dumps(planned[0])), [])
    assert_loaded(consumer, "a")


def test_an_engine_of_both_roles_saves_and_loads(store: StoreProcess, make_engine: MakeEngine) -> None:
    """Without any proxy: what one has encoded, the other one loads."""
    first, second = make_engine("ec_both"), make_engine("ec_both")
    assert first.serve(plain_request("r", "a")) == ["a"]
    assert second.serve(plain_request("s", "a", "b")) == ["b"]
    assert first.serve(plain_request("t", "b")) == []
    assert_loaded(first, "a", "b")


# ---- the store -----------------------------------------------------------------------------------
def test_a_loaded_tensor_is_a_view_and_its_pin_ends_with_it(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    consumer.serve(plain_request("s", "a"))
    assert store.stats().num_pins == 1
    rows = consumer.encoder_cache.pop("a")[:2]  # a slice keeps it
    gc.collect()
    assert store.stats().num_pins == 1
    assert torch.equal(rows, output_of("a")[:2])
    del rows
    wait_until(lambda: store.stats().num_pins == 0, 60, "the view is gone, and its pin")
    assert (store.stats().num_watches, store.stats().num_reservations) == (0, 0)


def test_models_do_not_mix(store: StoreProcess, make_engine: MakeEngine) -> None:
    make_engine("ec_producer", namespace="one").serve(plain_request("r", "a"))
    assert make_engine("ec_consumer", namespace="other").serve(plain_request("s", "a")) == ["a"]
    assert make_engine("ec_consumer", namespace="one").serve(plain_request("s", "a")) == []


def test_an_encoder_loads_what_another_one_has_encoded(
    store: StoreProcess, encoder: PlainEngine, make_engine: MakeEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    other = make_engine("ec_producer")
    assert other.serve(plain_request("s", "a")) == []
    assert_loaded(other, "a")


def test_what_the_store_has_evicted_it_gets_again(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    """The encoder's cache has the item, so nothing is encoded; and the consumer has no media."""
    encoder.serve(plain_request("r", "a"))
    session = store.connect("operator")
    session.request(Evict(seq=0))
    assert encoder.serve(plain_request("s", "a")) == []
    assert consumer.serve(plain_request("t", "a", has_media=False)) == []
    assert_loaded(consumer, "a")


def test_a_request_that_ends_unscheduled_keeps_nothing(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    asked = plain_request("s", "a", "b", has_media=False)
    assert consumer.plan(asked) is None
    assert store.stats().num_pins == 1
    assert consumer.scheduler.take_unavailable_requests() == {"s"}
    consumer.scheduler.request_finished(asked)
    wait_until(lambda: store.stats().num_pins == 0, 60, "the pin of `a` is given back")


def test_a_full_store_saves_nothing_and_fails_nothing(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    filler, spec = store.connect("filler"), TensorSpec(shape=(16384, 1), dtype="float32", num_bytes=65536)
    with pytest.raises(StoreFullError):  # noqa: PT012 -- as many as there is space for
        for number in range(1000):
            filler.request(Reserve(seq=0, mm_hash=f"{number:064x}", spec=spec))
    assert encoder.serve(plain_request("r", "a")) == ["a"]
    assert consumer.serve(plain_request("s", "a")) == ["a"]
    assert store.stats().num_seals_total == 0


def test_more_than_the_store_holds_goes_through_it(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    for number in range(100):
        encoder.serve(plain_request("r", f"item-{number}"))
        assert consumer.serve(plain_request("s", f"item-{number}")) == []
        assert_loaded(consumer, f"item-{number}")
        encoder.encoder_cache.clear()
        consumer.encoder_cache.clear()
    assert store.stats().num_evictions_total > 0


# ---- the store is away ---------------------------------------------------------------------------
def test_engines_start_without_a_store_and_use_it_when_it_comes(
    stopped_store: StoreProcess, make_engine: MakeEngine
) -> None:
    encoder, consumer = make_engine("ec_producer"), make_engine("ec_consumer")
    assert encoder.serve(plain_request("r", "a")) == ["a"]
    assert consumer.serve(plain_request("s", "a")) == ["a"]
    stopped_store.start()
    wait_until(
        lambda: saves(encoder, stopped_store, "a"), 10, "the encoder's cache has it, and the store gets it"
    )
    del consumer.encoder_cache["a"]
    wait_until(lambda: consumer.scheduler.has_cache_item("a"), 10, "the consumer finds the store, too")


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_a_store_that_is_started_again(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine, with_signal: signal.Signals
) -> None:
    """SIGTERM: with a new region. SIGKILL: with what is in the old one."""
    encoder.serve(plain_request("r", "a"))
    consumer.serve(plain_request("s", "a"))
    store.stop(with_signal)
    assert consumer.serve(plain_request("t", "b")) == ["b"]  # meanwhile, without it
    assert_loaded(consumer, "a", "b")
    store.start()
    encoder.encoder_cache.clear()
    wait_until(lambda: saves(encoder, store, "c"), 10, "the encoder saves again")
    wait_until(lambda: loads(consumer, "c"), 10, "and the consumer loads it")
    assert_loaded(consumer, "a", "b", "c")


def saves(encoder: PlainEngine, store: StoreProcess, identifier: str) -> bool:
    encoder.serve(plain_request("r", identifier))
    return store.stats().num_seals_total > 0


def loads(consumer: PlainEngine, identifier: str) -> bool:
    consumer.encoder_cache.pop(identifier, None)
    return consumer.serve(plain_request("r", identifier)) == []


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
def test_the_store_is_started_again_between_plan_and_load(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine, with_signal: signal.Signals
) -> None:
    """The step is planned with the item: it must be had."""
    encoder.serve(plain_request("r", "a"))
    planned = consumer.plan(plain_request("s", "a"))
    assert planned is not None
    store.stop(with_signal)
    store.start()
    consumer.run(*planned)
    assert_loaded(consumer, "a")


def test_a_planned_item_is_loaded_while_the_store_is_away(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    planned = consumer.plan(plain_request("s", "a"))
    assert planned is not None
    store.stop(signal.SIGKILL)
    consumer.run(*planned)
    assert_loaded(consumer, "a")


def test_a_store_that_hangs_costs_one_bounded_wait(
    store: StoreProcess, encoder: PlainEngine, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    consumer = make_engine("ec_consumer", item_timeout_s=0, call_timeout_ms=2000.0)
    encoder.serve(plain_request("r", *"abc"))
    stats = store.stats()
    with stopped(store):
        assert consumer.serve(plain_request("s", *"abc")) == ["a", "b", "c"]
        assert consumer.serve(plain_request("t", *"def")) == ["d", "e", "f"]
    assert [each.getMessage() for each in caplog.records].count("store does not answer in time") == 1
    wait_until(lambda: store.stats().num_hits_total > stats.num_hits_total, 60, "the late answer")
    wait_until(lambda: store.stats().num_pins == 0, 60, "its pin is given back")
    consumer.encoder_cache.clear()
    assert consumer.serve(plain_request("u", *"abc")) == []


def test_an_encoder_goes_on_while_the_store_hangs(store: StoreProcess, make_engine: MakeEngine) -> None:
    encoder = make_engine("ec_producer", call_timeout_ms=2000.0)
    with stopped(store):
        assert encoder.serve(plain_request("r", "a", "b")) == ["a", "b"]
    wait_until(lambda: store.stats().num_reservations == 0, 60, "the late reservation is cancelled")
    encoder.serve(plain_request("s", "a", "b"))
    assert store.stats().num_seals_total == 2
