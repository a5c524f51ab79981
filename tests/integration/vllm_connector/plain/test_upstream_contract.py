"""What the tests in vLLM's repository ask of an EC connector, asked of ours, with a real store.

Those tests look at private fields and files of the connectors that come with vLLM. Here is what they ask for
beneath that, and what `test_plain_connector` does not have already. `test_stock_scheduler` has their second
half: the connector under vLLM's scheduler.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.plain_engine import PlainEngine, output_of, plain_request
from tests.support.waiting import wait_until
from triptych_common.domain.errors import StoreUnavailableError
from triptych_common.protocol.store import Descriptor, TensorSpec
from triptych_vllm_connector.plain.store_pins import StorePin

# Modules of torch that vLLM imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

MakeEngine = Callable[..., PlainEngine]


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


def test_a_request_is_deferred_until_its_items_are_there(
    encoder: PlainEngine, make_engine: MakeEngine
) -> None:
    engine, asked = make_engine("ec_consumer", item_timeout_s=60), plain_request("s", "a", has_media=False)
    assert not engine.scheduler.ensure_cache_available(asked, 0)
    encoder.serve(plain_request("r", "a"))
    wait_until(lambda: engine.scheduler.ensure_cache_available(asked, 0), 60, "the item is found")
    assert engine.scheduler.take_unavailable_requests() == set()


def test_a_request_without_items_or_with_all_of_them_computed_is_not_deferred(consumer: PlainEngine) -> None:
    assert consumer.scheduler.ensure_cache_available(plain_request("r"), 0)
    assert consumer.scheduler.ensure_cache_available(plain_request("s", "a", has_media=False), 8)


# ---- a step's metadata ---------------------------------------------------------------------------
def scheduled(*names: str) -> SimpleNamespace:
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def test_a_step_names_each_allocated_item_with_its_size(encoder: PlainEngine, consumer: PlainEngine) -> None:
    encoder.serve(plain_request("r", *"abc"))
    step, to_encode = consumer.plan(plain_request("s", *"abc"))
    assert to_encode == []
    assert {name: pin.descriptor.spec.shape for name, pin in step.loads.items()} == {
        name: tuple(output_of(name).shape) for name in "abc"
    }


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


def test_a_step_without_loads_leaves_the_encoder_cache_as_it_is(consumer: PlainEngine) -> None:
    step, _ = consumer.plan(plain_request("r"))
    own = torch.zeros(1, 1)
    consumer.encoder_cache["a"] = own
    consumer.run(step, [])
    assert consumer.encoder_cache == {"a": own}


def test_an_item_that_is_not_there_ends_the_load_with_an_error(consumer: PlainEngine) -> None:
    """It cannot come to that by a plan of the scheduler's side, which names pinned items alone."""
    spec = TensorSpec(shape=(8, 32), dtype="float32", num_bytes=1024)
    pin = StorePin(1, Descriptor(mm_hash="0" * 64, spec=spec, offset=0, generation=1), "no region")
    step, _ = consumer.plan(plain_request("r"))
    step.loads["a"] = pin
    with pytest.raises(StoreUnavailableError):
        consumer.run(step, [])
    assert consumer.encoder_cache == {}


def test_metadata_is_bound_for_one_step(consumer: PlainEngine) -> None:
    worker, (step, _) = consumer.worker, consumer.plan(plain_request("r"))
    for _ in range(2):
        with pytest.raises(AssertionError):  # vLLM's own
            worker.start_load_caches({})
        worker.bind_connector_metadata(step)
        worker.start_load_caches({})
        worker.clear_connector_metadata()


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
