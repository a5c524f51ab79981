"""Engine options that cannot be served, in every spelling that vLLM's own parser takes."""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.support.families.folders import family_folder
from tests.support.real.system import MODEL, START_TIMEOUT_S
from tests.support.real.warm import client as warm
from tests.support.real.warm.preload import ENVIRONMENT
from triptych_common.protocol.messages import Role
from triptych_vllm_connector.host.engine_options import (
    TextModelError,
    UndividedModelError,
    UnsupportedOptionError,
    check_division,
    check_engine_options,
    check_has_media,
)

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from triptych_vllm_connector.seams.current import seam

CONFIG = 'media-io-kwargs: \'{"image": {"image_mode": "RGBA"}}\'\n'


def parsed(*options: str) -> Any:
    return seam.cli_args().make_arg_parser(FlexibleArgumentParser()).parse_args(list(options))


def check(*options: str) -> None:
    check_engine_options(parsed(*options))


@pytest.mark.parametrize(
    "options",
    [
        ['--media-io-kwargs={"image": {"image_mode": "RGBA"}}'],
        ["--media-io-kwargs", '{"image": {"image_mode": "RGBA"}}'],
        ["--media_io_kwargs", '{"image": {"image_mode": "RGBA"}}'],
        ["--media-io-kwargs.image.image_mode=RGBA"],
        ["--media-io-kwargs.image.image_mode", "RGBA"],
        ['--media-io-kwargs={"video": {"num_frames": 4}, "image": {"image_mode": "RGBA"}}'],
        ['--media-io-kwargs={"video": {"num_frames": 4}}'],
        ["--media-io-kwargs.audio.audio_backend=pyav"],
    ],
    ids=" ".join,
)
def test_options_of_media_are_refused_and_named(options: list[str]) -> None:
    with pytest.raises(UnsupportedOptionError, match="--media-io-kwargs"):
        check(*options)


def test_in_a_file_of_options_too(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(CONFIG)
    with pytest.raises(UnsupportedOptionError):
        check("--config", str(file))


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--media-io-kwargs={}"],
        ['--media-io-kwargs={"image": {}, "video": {}}'],
    ],
    ids=str,
)
def test_what_sets_nothing_is_taken(options: list[str]) -> None:
    check(*options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--data-parallel-size=2"], "cannot be above 1: start an instance for each engine instead"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--pipeline-parallel-size=2"], "--pipeline-parallel-size cannot be above 1"),
        (["-pp", "2"], "--pipeline-parallel-size"),
        (["--enable-lora", "--enable-tower-connector-lora"], "--enable-tower-connector-lora cannot be set"),
    ],
)
def test_what_the_handover_cannot_do_is_refused_in_one_sentence(options: list[str], named: str) -> None:
    with pytest.raises(UnsupportedOptionError) as caught:
        check(*options)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("service", ["triptych_prefill_decode", "triptych_encoder"])
def test_a_service_ends_at_its_start_and_says_why(service: str, redis_url: str, tmp_path: Path) -> None:
    """Not with what vLLM's engines say when the second of them finds the first one's session."""
    places = {"TRIPTYCH_REDIS_URL": redis_url, "TRIPTYCH_RUN_DIR": str(tmp_path)}
    run = warm.run(
        [sys.executable, "-m", service, f"--model={MODEL}", f"--engine-args={json.dumps(['-dp=2'])}"],
        environment={**ENVIRONMENT, **os.environ, **places}, timeout_s=START_TIMEOUT_S,
    )  # fmt: skip
    said = run.stdout + run.stderr
    assert run.returncode == 1, said
    assert "--data-parallel-size cannot be above 1" in said
    assert "not_owner" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize("role", Role)
def test_an_encoder_decoder_model_is_not_divided(role: Role, tmp_path: Path) -> None:
    """By its configuration alone: nothing is loaded."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", "is_encoder_decoder": True}))
    args = parsed(f"--model={tmp_path}")
    if role is Role.ENCODE_PREFILL_DECODE:
        check_division(args, role)
        return
    with pytest.raises(UndividedModelError, match="TRIPTYCH_ROLE=encode-prefill-decode"):
        check_division(args, role)


def test_a_model_whose_items_are_not_processed_apart_has_no_encoder() -> None:
    """Several images of a request are processed otherwise than each by itself."""
    args = parsed(f"--model={MODEL}", '--hf-overrides={"architectures": ["H2OVLChatModel"]}')
    with pytest.raises(UndividedModelError, match=r"cannot have an encoder: .*encode-prefill-decodes 1"):
        check_division(args, Role.ENCODE)
    check_division(args, Role.ENCODE_PREFILL_DECODE)


def test_a_model_whose_processor_is_chosen_by_a_function_may_have_an_encoder() -> None:
    check_division(parsed(f"--model={family_folder('llava')}"), Role.ENCODE)


def test_an_encoder_refuses_a_model_of_text_alone_before_its_engine_starts(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TextModelError, match="--encoders 0 --local-encode fallback"):
        check_has_media(parsed(f"--model={tmp_path}", "--skip-tokenizer-init"))
    check_has_media(parsed(f"--model={MODEL}"))


def test_other_models_are_divided(tmp_path: Path) -> None:
    for model in (str(MODEL), str(tmp_path)):  # of the last one, which is none, vLLM says so
        args = parsed(f"--model={model}")
        check_division(args, Role.PREFILL_DECODE)
        check_division(args, Role.ENCODE)
