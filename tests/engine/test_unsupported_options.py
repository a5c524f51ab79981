"""Engine options that cannot be served, in every spelling that vLLM's own parser takes."""

import warnings
from pathlib import Path

import pytest

from triptych_vllm_connector.host.engine_options import UnsupportedOptionError, check_engine_options

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

CONFIG = 'media-io-kwargs: \'{"image": {"image_mode": "RGBA"}}\'\n'


def check(*options: str) -> None:
    check_engine_options(make_arg_parser(FlexibleArgumentParser()).parse_args(list(options)))


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
