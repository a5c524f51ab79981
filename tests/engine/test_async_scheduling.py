"""Whether vLLM schedules a step before the output of the last one, with the options of our engines."""

import copy
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.vllm_connector.fake_engine import mm_hash
from tests.support.vllm_connector.parking_engine import ParkingEngine, vllm_config
from tests.support.vllm_connector.parking_worker import RIGHT
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import encoder_options, prefill_decode_options

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from triptych_vllm_connector.scheduler.decode_scheduler import DecodeAsyncScheduler, DecodeScheduler
    from triptych_vllm_connector.scheduler.parking_scheduler import ParkingAsyncScheduler, ParkingScheduler
    from triptych_vllm_connector.seams.current import seam

CONFIG = ConnectorConfig(
    instance="encoder-0",
    deployment="d",
    redis_url="unix:///nowhere",
    store_socket=Path("/run/store.sock"),
    namespace_digest="0" * 64,
)


def engine_args(options: list[str]) -> Any:
    parser = seam.cli_args().make_arg_parser(FlexibleArgumentParser())
    return AsyncEngineArgs.from_cli_args(parser.parse_args(options))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_encoder_schedules_one_step_at_a_time(on_gpu: bool) -> None:
    assert engine_args(encoder_options(CONFIG, "model", 4, on_gpu, [])).async_scheduling is False


def test_an_option_of_the_user_wins() -> None:
    options = encoder_options(CONFIG, "model", 4, True, ["--async-scheduling"])
    assert engine_args(options).async_scheduling is True


def scheduler_made_by(config: ConnectorConfig, on_gpu: bool) -> Any:
    """Return the scheduler class or function that vLLM finds by the options of a prefill_decode."""
    options = engine_args(prefill_decode_options(config, "model", on_gpu, []))
    scheduler_config = copy.copy(vllm_config().scheduler_config)
    scheduler_config.scheduler_cls = options.scheduler_cls
    return scheduler_config.get_scheduler_cls()


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(("num_in_flight", "cls"), [(1, ParkingScheduler), (2, ParkingAsyncScheduler)])
def test_requests_are_answered_by_the_scheduler_that_the_configuration_asks_for(
    on_gpu: bool, num_in_flight: int, cls: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, too, where an option of the user's, or speculative decoding, rules overlapping steps out."""
    engine = ParkingEngine(monkeypatch, scheduler_made_by(CONFIG, on_gpu), num_in_flight)
    assert type(engine.scheduler) is cls
    item = mm_hash("a")
    engine.add("r1", item)
    engine.run()
    engine.comes(item)
    engine.run()
    assert engine.tokens == {"r1": [RIGHT, RIGHT]}
    engine.check_idle()


@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(("is_async", "cls"), [(False, DecodeScheduler), (True, DecodeAsyncScheduler)])
def test_engines_that_decode_have_the_scheduler_that_the_configuration_asks_for(
    on_gpu: bool, is_async: bool, cls: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = scheduler_made_by(CONFIG.model_copy(update={"decodes_only": True}), on_gpu)
    monkeypatch.setattr(cls, "__init__", lambda self, **options: None)
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    assert type(make(vllm_config=config)) is cls
