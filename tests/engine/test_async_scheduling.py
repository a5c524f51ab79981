"""Whether vLLM schedules a step before the output of the last one, with the options of our engines."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import encoder_options

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

CONFIG = ConnectorConfig(
    instance="encoder-0",
    deployment="d",
    redis_url="unix:///nowhere",
    store_socket=Path("/run/store.sock"),
    namespace_digest="0" * 64,
)


def engine_args(options: list[str]) -> Any:
    return AsyncEngineArgs.from_cli_args(make_arg_parser(FlexibleArgumentParser()).parse_args(options))


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_encoder_schedules_one_step_at_a_time(on_gpu: bool) -> None:
    assert engine_args(encoder_options(CONFIG, "model", 4, on_gpu, [])).async_scheduling is False


def test_an_option_of_the_user_wins() -> None:
    options = encoder_options(CONFIG, "model", 4, True, ["--async-scheduling"])
    assert engine_args(options).async_scheduling is True
