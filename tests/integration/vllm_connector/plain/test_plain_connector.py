"""What vLLM asks of an EC connector, with a real store between two engines.

The behaviours are those that vLLM's own tests ask of its example connector, and the store's beside them.
"""

import contextlib
import gc
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.plain_engine import (
    PlainEngine,
    output_of,
    plain_request,
)
from tests.support.waiting import wait_until
from triptych_common.domain.errors import StoreFullError, StoreUnavailableError
from triptych_common.protocol.store import Descriptor, Evict, Reserve, TensorSpec
from triptych_vllm_connector.plain.store_pins import StorePin

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


# ---- what the tests in vLLM's repository ask of an EC connector beneath its private fields and files
# Modules of torch that vLLM imports warn of their own deprecations.


def has_items(engine: PlainEngine, identifiers: str) -> list[bool]:
    return [engine.scheduler.has_cache_item(each) for each in identifiers]


# ---- roles ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("role", "saves", "only_loads"),
    [("ec_producer", True, False), ("ec_consumer", False, True), ("ec_both", True, True)],
)
def test_a_connector_knows_its_side_and_its_role(
    store: StoreProcess, make_engine: MakeEngine, role: str, saves: bool, only_loads: bool
) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    engine = make_engine(role)
    assert engine.scheduler.role is ECConnectorRole.SCHEDULER
    assert engine.worker.role is ECConnectorRole.WORKER
    for side in (engine.scheduler, engine.worker):
        assert (side.is_producer, side.is_consumer) == (saves, only_loads)


def test_each_side_does_its_own_part_alone(store: StoreProcess, encoder: PlainEngine) -> None:
    """vLLM never asks a worker for an item, nor EngineCore to save one. Its example connector does both."""
    encoder.serve(plain_request("r", "a"))
    assert not encoder.worker.has_cache_item("a")
    encoder.scheduler.save_caches({"b": output_of("b")}, "b")
    assert store.stats().num_seals_total == 1
    assert encoder.worker.ensure_cache_available(plain_request("s", "b"), 0)


# ---- which items there are -----------------------------------------------------------------------
def test_a_question_that_is_asked_again_holds_nothing_more(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    assert [has_items(consumer, "ab") for _ in range(3)] == [[True, False]] * 3
    assert store.stats().num_pins == 1


def test_a_request_without_items_or_with_all_of_them_computed_is_not_deferred(consumer: PlainEngine) -> None:
    assert consumer.scheduler.ensure_cache_available(plain_request("r"), 0)
    assert consumer.scheduler.ensure_cache_available(plain_request("s", "a", has_media=False), 8)


# ---- a step's metadata ---------------------------------------------------------------------------
def scheduled(*names: str) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def test_an_item_twice_in_a_request_is_loaded_once(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", *"ab"))
    step, _ = consumer.plan(plain_request("s", *"aba"))
    assert list(step.loads) == ["a", "b"]
    consumer.run(step, [])
    assert list(consumer.encoder_cache) == ["a", "b"]
    wait_until(lambda: store.stats().num_pins == 2, 60, "one pin for each view")


def test_an_item_that_was_found_is_in_a_step_when_it_is_allocated(
    encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    asked, side = plain_request("s", "a"), consumer.scheduler
    assert side.ensure_cache_available(asked, 0)
    assert side.has_cache_item("a")
    assert side.build_connector_meta(scheduled()).loads == {}
    side.update_state_after_alloc(asked, 0)
    assert list(side.build_connector_meta(scheduled("s")).loads) == ["a"]
    assert side.build_connector_meta(scheduled("s")).loads == {}


# ---- saving --------------------------------------------------------------------------------------
def test_what_is_saved_is_not_changed_by_saving_it_again(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", "a"))
    encoder.encoder_cache["a"] = torch.zeros_like(output_of("a"))
    encoder.serve(plain_request("s", "a"))
    consumer.serve(plain_request("t", "a"))
    assert torch.equal(consumer.encoder_cache["a"], output_of("a"))
    assert store.stats().num_seals_total == 1


@pytest.mark.parametrize("shape", [(0,), (0, 32), (8,), (2, 4, 32)], ids=str)
def test_a_tensor_that_cannot_be_saved_fails_nothing(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine, shape: tuple[int, ...]
) -> None:
    step, _ = encoder.plan(plain_request("r", *"ab"))
    encoder.worker.bind_connector_metadata(step)
    encoder.worker.start_save_caches(encoder_cache=encoder.encoder_cache)
    encoder.encoder_cache.update(a=torch.empty(shape), b=output_of("b"))
    for name in "ab":
        encoder.worker.save_caches(encoder.encoder_cache, name)
    encoder.worker.clear_connector_metadata()
    assert has_items(consumer, "ab") == [False, True]
    assert store.stats().num_reservations == 0


def test_what_is_saved_outside_of_a_step_is_there_too(encoder: PlainEngine, consumer: PlainEngine) -> None:
    encoder.worker.save_caches({"a": output_of("a")}, "a")
    wait_until(lambda: consumer.scheduler.has_cache_item("a"), 60, "the item is sealed")


# ---- loading -------------------------------------------------------------------------------------
def test_what_the_encoder_cache_has_is_not_replaced(
    store: StoreProcess, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    encoder.serve(plain_request("r", *"ab"))
    planned = consumer.plan(plain_request("s", *"ab"))
    own = torch.zeros(1, 1)
    consumer.encoder_cache["a"] = own
    consumer.run(*planned)
    assert consumer.encoder_cache["a"] is own
    assert torch.equal(consumer.encoder_cache["b"], output_of("b"))
    wait_until(lambda: store.stats().num_pins == 1, 60, "the pin that is not needed is given back")


def test_an_item_that_is_not_there_ends_the_load_with_an_error(consumer: PlainEngine) -> None:
    """It cannot come to that by a plan of the scheduler's side, which names pinned items alone."""
    spec = TensorSpec(shape=(8, 32), dtype="float32", num_bytes=1024)
    pin = StorePin(1, Descriptor(mm_hash="0" * 64, spec=spec, offset=0, generation=1), "no region")
    step, _ = consumer.plan(plain_request("r"))
    step.loads["a"] = pin
    with pytest.raises(StoreUnavailableError):
        consumer.run(step, [])
    assert consumer.encoder_cache == {}


def test_metadata_of_another_connector_is_refused(consumer: PlainEngine) -> None:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

    class OtherStep(ECConnectorMetadata):
        pass

    consumer.worker.bind_connector_metadata(OtherStep())
    with pytest.raises(TypeError, match="OtherStep"):
        consumer.worker.start_load_caches({})


# ---- the end of a request ------------------------------------------------------------------------
def test_a_producers_answer_names_each_item_with_all_its_places(
    encoder: PlainEngine, consumer: PlainEngine
) -> None:
    """`metadata` is empty: the model of these engines is none."""
    asked = plain_request("r", *"aba")
    assert encoder.scheduler.request_finished(asked) == (
        False,
        {"a": {"metadata": {}, "item_indices": [0, 2]}, "b": {"metadata": {}, "item_indices": [1]}},
    )
    assert encoder.scheduler.request_finished(plain_request("s")) == (False, None)
    assert consumer.scheduler.request_finished(asked) == (False, None)


# ---- vLLM's newer runner -------------------------------------------------------------------------
def run_by_vllm(monkeypatch: pytest.MonkeyPatch, engine: PlainEngine, name: str, encodes: str) -> None:
    """One step with these items, by the runner's own wrapper of the connector."""
    from vllm.v1.worker.gpu import ec_connector

    monkeypatch.setattr(ec_connector, "get_ec_transfer", lambda: engine.worker)
    wrapper = ec_connector.ActiveECConnector(SimpleNamespace(), engine.encoder_cache)
    step, to_encode = engine.plan(plain_request(name, *encodes))
    output = SimpleNamespace(ec_connector_metadata=step, finished_req_ids=set())
    if not to_encode:
        wrapper.no_forward(output)
        return
    with wrapper.maybe_get_output(output):
        engine.encoder_cache.update((each, output_of(each)) for each in to_encode)


@pytest.mark.parametrize("role", ["ec_producer", "ec_both", "ec_consumer"])
def test_vllms_wrapper_saves_what_a_step_adds_and_loads_what_it_needs(
    monkeypatch: pytest.MonkeyPatch,
    store: StoreProcess,
    encoder: PlainEngine,
    make_engine: MakeEngine,
    role: str,
) -> None:
    encoder.serve(plain_request("r", "a"))
    engine = make_engine(role)
    run_by_vllm(monkeypatch, engine, "s", "ab")
    for name in "ab":
        assert torch.equal(engine.encoder_cache[name], output_of(name))
    assert store.stats().num_seals_total == (1 if role == "ec_consumer" else 2)
    run_by_vllm(monkeypatch, engine, "t", "ab")  # nothing to do, and nothing to fail
    with pytest.raises(AssertionError):
        engine.worker.start_load_caches({})


def test_a_step_that_fails_in_the_model_ends_for_the_connector_too(
    monkeypatch: pytest.MonkeyPatch, encoder: PlainEngine, consumer: PlainEngine
) -> None:
    from vllm.v1.worker.gpu import ec_connector

    monkeypatch.setattr(ec_connector, "get_ec_transfer", lambda: encoder.worker)
    wrapper = ec_connector.ActiveECConnector(SimpleNamespace(), encoder.encoder_cache)
    step, _ = encoder.plan(plain_request("r", "a"))
    with (
        pytest.raises(RuntimeError, match="out of cores"),
        wrapper.maybe_get_output(SimpleNamespace(ec_connector_metadata=step, finished_req_ids=set())),
    ):
        raise RuntimeError("out of cores")
    assert not consumer.scheduler.has_cache_item("a")
    assert encoder.serve(plain_request("s", "a")) == ["a"]
