"""Options of the plain connector: few are required, and what two engines must have in common follows."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from triptych_vllm_connector.config import StoreConfig

with warnings.catch_warnings(action="ignore"):  # importing vLLM warns, of torch's own use of torch
    from triptych_vllm_connector.plain.connector import PlainOptions


def vllm_config(
    num_stages: int = 1, replica: int = 0, tower_loras: bool | None = None, **options: Any
) -> Any:
    """`tower_loras`: None: no LoRA adapters at all."""
    loras = None if tower_loras is None else SimpleNamespace(enable_tower_connector_lora=tower_loras)
    return SimpleNamespace(
        lora_config=loras,
        ec_transfer_config=SimpleNamespace(
            ec_connector_extra_config={"store_socket": "/run/store.sock", **options}, engine_id="uuid"
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=num_stages, data_parallel_index=replica),
    )


def store_config(num_stages: int = 1, replica: int = 0, **options: Any) -> StoreConfig:
    config = vllm_config(num_stages, replica, **options)
    return PlainOptions.from_vllm(config).store_config(config)


def test_the_socket_alone_is_required() -> None:
    options = PlainOptions.from_vllm(vllm_config())
    assert options.store_socket == Path("/run/store.sock")
    with pytest.raises(ValidationError):
        PlainOptions.model_validate({})


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValidationError, match="shared_storage_path"):
        PlainOptions.from_vllm(vllm_config(shared_storage_path="/tmp"))


def test_engines_of_one_namespace_have_one_digest() -> None:
    assert store_config(namespace="m").namespace_digest == store_config(namespace="m").namespace_digest
    assert store_config(namespace="m").namespace_digest != store_config(namespace="n").namespace_digest


def test_engines_of_a_data_parallel_group_have_names_of_their_own() -> None:
    names = {store_config(namespace="m", replica=replica).instance for replica in range(3)}
    assert len(names) == 3
    assert store_config(namespace="m", instance="e-1").instance == "e-1"


def test_a_name_that_the_store_does_not_take_is_refused() -> None:
    with pytest.raises(ValidationError, match="instance"):
        PlainOptions.from_vllm(vllm_config(instance="a b"))


def test_several_pipeline_stages_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline-parallel-size"):
        store_config(num_stages=2, namespace="m")


def test_adapters_that_change_what_is_encoded_are_refused() -> None:
    """Two engines may have loaded two under one name."""
    others = PlainOptions.from_vllm(vllm_config(namespace="m", tower_loras=False))
    others.store_config(vllm_config(namespace="m", tower_loras=False))
    with pytest.raises(ValueError, match="enable-tower-connector-lora"):
        others.store_config(vllm_config(namespace="m", tower_loras=True))
