"""vLLM's own scheduler over the plain connector and a real store: what it loads, and what it encodes.

The situations are those in which vLLM's tests of its scheduler look at the EC connector. There a stand-in
says which items exist; here the store has them, or has not. The test is the runner.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from unittest.mock import patch

import pytest

from tests.support.stores import StoreProcess
from tests.support.vllm_connector.parking_engine import MODEL, block_hasher, one_layer_scheduler
from tests.support.vllm_connector.plain_engine import Media, PlainEngine
from tests.support.waiting import wait_until

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus

    from triptych_vllm_connector.plain.connector import PlainStep

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BLOCK_SIZE, ROWS, GAP, TOKEN = 16, 10, 2, 5
WIDTH = 128  # of the model


class StockScheduler:
    """With `PlainECConnector`, as vLLM's factory makes it. Each scheduled request samples one token."""

    def __init__(self, store: StoreProcess, role: str, num_blocks: int, cache_rows: int) -> None:
        with warnings.catch_warnings(action="ignore"):
            config = EngineArgs(
                model=str(MODEL),
                max_num_batched_tokens=512,
                max_model_len=512,
                max_num_seqs=8,
                block_size=BLOCK_SIZE,
                enable_prefix_caching=True,
                async_scheduling=False,
                ec_transfer_config={
                    "ec_connector": "PlainECConnector",
                    "ec_connector_module_path": "triptych_vllm_connector.plain.connector",
                    "ec_role": role,
                    "ec_connector_extra_config": {"store_socket": str(store.socket), "namespace": "test"},
                },
            ).create_engine_config()
            self.vllms = one_layer_scheduler(Scheduler, config, num_blocks, BLOCK_SIZE)
        self.vllms.encoder_cache_manager = EncoderCacheManager(cache_rows)
        self.failed: set[str] = set()

    def add(
        self, name: str, *identifiers: str, text: int = 4, max_tokens: int = 4, has_media: bool = True
    ) -> Request:
        """GAP tokens stand before each item, and `text` behind the last one."""
        media = {"pixel_values": torch.zeros(1)} if has_media else {}
        features = [
            MultiModalFeatureSpec(
                data=Media(image_grid_thw=torch.tensor([1, 2, 2]), **media),
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=place * (GAP + ROWS) + GAP, length=ROWS),
            )
            for place, identifier in enumerate(identifiers)
        ]
        request = Request(
            request_id=name,
            prompt_token_ids=[TOKEN] * (len(features) * (GAP + ROWS) + text),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            mm_features=features,
            block_hasher=block_hasher(),
        )
        self.vllms.add_request(request)
        return request

    def step(self) -> SchedulerOutput:
        return self.vllms.schedule()

    def end_step(self, output: SchedulerOutput) -> None:
        names = list(output.num_scheduled_tokens)
        outputs = self.vllms.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: place for place, name in enumerate(names)},
                sampled_token_ids=[[TOKEN] for _ in names],
            ),
        )
        self.failed |= {
            each.request_id
            for each in (outputs[0].outputs if 0 in outputs else ())
            if str(each.finish_reason) == "error"
        }

    def run(self) -> list[SchedulerOutput]:
        """Until no request is left: the steps that it took."""
        steps = []
        while self.vllms.has_unfinished_requests():
            assert len(steps) < 100, "the engine steps and steps"
            steps.append(self.step())
            self.end_step(steps[-1])
        return steps


def loads(output: SchedulerOutput) -> list[str]:
    assert isinstance(output.ec_connector_metadata, PlainStep)
    return list(output.ec_connector_metadata.loads)


MakeScheduler = Callable[..., StockScheduler]


@pytest.fixture
def make_scheduler(store: StoreProcess) -> Iterator[MakeScheduler]:
    made: list[StockScheduler] = []

    def make(role: str = "ec_consumer", num_blocks: int = 100, cache_rows: int = 1000) -> StockScheduler:
        made.append(StockScheduler(store, role, num_blocks, cache_rows))
        return made[-1]

    with patch.dict(os.environ):  # vLLM sets variables when it makes a configuration
        yield make
    for each in made:
        each.vllms.shutdown()


@pytest.fixture
def save(encoder: PlainEngine) -> Callable[[str], None]:
    """The store gets each item of these names."""

    def save(identifiers: Sequence[str]) -> None:
        encoder.worker.bind_connector_metadata(PlainStep())
        for each in identifiers:
            encoder.worker.save_caches({each: torch.ones(ROWS, WIDTH)}, each)
        encoder.worker.clear_connector_metadata()

    return save


Save = Callable[[Sequence[str]], None]


def test_a_request_of_text_alone_concerns_no_connector(make_scheduler: MakeScheduler) -> None:
    scheduler = make_scheduler()
    scheduler.add("r", text=40)
    output = scheduler.step()
    assert output.num_scheduled_tokens == {"r": 40}
    assert (loads(output), output.scheduled_encoder_inputs) == ([], {})
    assert scheduler.vllms.encoder_cache_manager.cached == {}


def test_own_cache_then_store_then_encoder(make_scheduler: MakeScheduler, save: Save) -> None:
    """Two requests, one after the other; the second one needs an item that the first one has encoded."""
    save("bf")
    scheduler = make_scheduler()
    scheduler.add("r", *"abaf", max_tokens=1)
    output = scheduler.step()
    assert (loads(output), output.scheduled_encoder_inputs) == (["b", "f"], {"r": [0]})
    scheduler.end_step(output)
    save("ac")  # by now the store has `a`, and the engine's cache too
    scheduler.add("s", *"cdea", max_tokens=1)
    output = scheduler.step()
    assert (loads(output), output.scheduled_encoder_inputs) == (["c"], {"s": [1, 2]})


@pytest.mark.parametrize("where", ["cache", "store", "nowhere"])
def test_many_requests_in_one_step(make_scheduler: MakeScheduler, save: Save, where: str) -> None:
    names = [f"item-{number}" for number in range(8)]
    save(names if where != "nowhere" else [])
    scheduler = make_scheduler()
    if where == "cache":
        scheduler.add("first", *names, max_tokens=1)
        scheduler.run()
    for name in names:
        scheduler.add(f"r-{name}", name)
    output = scheduler.step()
    assert len(output.num_scheduled_tokens) == len(names)
    assert loads(output) == (names if where == "store" else [])
    assert output.scheduled_encoder_inputs == (
        {f"r-{name}": [0] for name in names} if where == "nowhere" else {}
    )
    assert set(scheduler.vllms.encoder_cache_manager.cached) == set(names)


def test_an_item_of_two_requests_is_loaded_once(make_scheduler: MakeScheduler, save: Save) -> None:
    save("a")
    scheduler = make_scheduler()
    for name in "rs":
        scheduler.add(name, "a")
    output = scheduler.step()
    assert (set(output.num_scheduled_tokens), loads(output)) == ({"r", "s"}, ["a"])
    assert output.scheduled_encoder_inputs == {}


def test_a_request_for_which_there_are_no_blocks_loads_when_there_are(
    store: StoreProcess, make_scheduler: MakeScheduler, save: Save
) -> None:
    save("ab")
    scheduler = make_scheduler(num_blocks=4)  # one of them is vLLM's own
    for name, item in ("ra", "sb"):
        scheduler.add(name, item, text=20, max_tokens=2)
    steps = scheduler.run()
    assert [loads(output) for output in steps if loads(output)] == [["a"], ["b"]]
    assert not any(output.scheduled_encoder_inputs for output in steps)
    assert scheduler.vllms.kv_cache_manager.block_pool.get_num_free_blocks() == 3


@pytest.mark.parametrize("where", ["cache", "store", "nowhere"])
def test_a_request_that_was_preempted_needs_its_items_again(
    store: StoreProcess, make_scheduler: MakeScheduler, save: Save, where: str
) -> None:
    if where != "nowhere":
        save("a")
    scheduler = make_scheduler()
    low = scheduler.add("low", "a", text=2, max_tokens=8)
    first = scheduler.step()
    assert (loads(first) == ["a"]) is (where != "nowhere")
    scheduler.end_step(first)
    scheduler.vllms.reset_prefix_cache(reset_running_requests=True)
    assert low.status is RequestStatus.PREEMPTED
    if where != "cache":
        scheduler.vllms.encoder_cache_manager.reset()
    output = scheduler.step()
    assert "low" in output.num_scheduled_tokens
    assert loads(output) == (["a"] if where == "store" else [])
    assert output.scheduled_encoder_inputs == ({"low": [0]} if where == "nowhere" else {})


def test_the_encoder_cache_takes_as_many_items_as_it_has_rows_for(
    make_scheduler: MakeScheduler, save: Save
) -> None:
    """The store has the items of the second request; there is room for two of them beside the first one's."""
    save("bcd")
    scheduler = make_scheduler(cache_rows=3 * ROWS)
    scheduler.add("r", "a", max_tokens=1)
    scheduler.add("s", *"bcd", max_tokens=2)
    output = scheduler.step()
    assert (loads(output), output.scheduled_encoder_inputs) == (["b", "c"], {"r": [0]})
    assert output.num_scheduled_tokens["s"] == 2 * (GAP + ROWS) + GAP
    scheduler.end_step(output)
    output = scheduler.step()
    assert (loads(output), output.scheduled_encoder_inputs) == (["d"], {})
    assert output.free_encoder_mm_hashes == ["a"]


def test_an_item_that_was_dropped_is_loaded_again(make_scheduler: MakeScheduler, save: Save) -> None:
    save("ab")
    scheduler = make_scheduler(cache_rows=ROWS)
    steps = []
    for name, item in ("ra", "sb", "ta"):
        scheduler.add(name, item, max_tokens=1)
        steps += scheduler.run()
    assert [loads(output) for output in steps] == [["a"], ["b"], ["a"]]


def test_metadata_alone_waits_in_front_of_the_scheduler_and_others_go_on(
    make_scheduler: MakeScheduler, save: Save
) -> None:
    scheduler = make_scheduler()
    scheduler.add("waits", "a", has_media=False, max_tokens=1)
    scheduler.add("goes on", "b", max_tokens=1)
    output = scheduler.step()
    assert set(output.num_scheduled_tokens) == {"goes on"}
    scheduler.end_step(output)
    save("a")
    steps = []

    def is_scheduled() -> bool:
        steps.append(scheduler.step())
        scheduler.end_step(steps[-1])
        return bool(steps[-1].num_scheduled_tokens)

    wait_until(is_scheduled, 60, "the item is found")
    assert loads(steps[-1]) == ["a"]
    assert scheduler.failed == set()


def test_a_request_that_ends_frees_its_pin_and_a_producer_names_its_items(
    store: StoreProcess, make_scheduler: MakeScheduler, save: Save
) -> None:
    save("a")
    producer = make_scheduler("ec_producer")
    request = producer.add("r", "a", "b", max_tokens=1)
    producer.vllms.ec_connector.has_cache_item("a")
    assert store.stats().num_pins == 1
    (ended,) = producer.vllms.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert ended is request
    wait_until(lambda: store.stats().num_pins == 0, 60, "the pin is given back")
    again = producer.add("s", "a", "b", max_tokens=1)
    again.status = RequestStatus.FINISHED_STOPPED
    kv_params, ec_params = producer.vllms._free_request(again)
    grid = {"image_grid_thw": [1, 2, 2]}
    assert (kv_params, ec_params) == (
        None,
        {"a": {"metadata": grid, "item_indices": [0]}, "b": {"metadata": grid, "item_indices": [1]}},
    )
