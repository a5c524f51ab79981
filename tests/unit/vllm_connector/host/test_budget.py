"""The preallocator's budget, from rows and bytes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triptych_vllm_connector.config import ConnectorConfig
from triptych_vllm_connector.host.model_facts import budget_embeds, row_num_bytes


def model(num_deepstack_layers: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    vision = SimpleNamespace(deepstack_visual_indexes=list(range(num_deepstack_layers)))
    return SimpleNamespace(
        hf_config=SimpleNamespace(vision_config=vision), get_inputs_embeds_size=lambda: 128, dtype=dtype
    )


def config(rows: int | None, num_bytes: int | None) -> ConnectorConfig:
    return ConnectorConfig(
        instance="pd-0",
        deployment="test",
        redis_url="redis://localhost",
        store_socket=Path("store.sock"),
        namespace_digest="0",
        budget_embeds=rows,
        budget_num_bytes=num_bytes,
    )


def test_a_row_is_as_wide_as_its_layers() -> None:
    assert row_num_bytes(model()) == 256
    assert row_num_bytes(model(num_deepstack_layers=3)) == 4 * 256
    assert row_num_bytes(model(dtype=torch.float32)) == 512
    without_tower = model()
    without_tower.hf_config = SimpleNamespace()
    assert row_num_bytes(without_tower) == 256


@pytest.mark.parametrize(
    ("rows", "num_bytes", "expected"),
    [
        (None, None, 1000),  # vLLM's encoder cache
        (50, None, 50),
        (None, 256 * 30 + 255, 30),
        (50, 256 * 30, 30),
        (20, 256 * 30, 20),
        (None, 1, 1),
    ],
)
def test_the_smaller_bound_counts(rows: int | None, num_bytes: int | None, expected: int) -> None:
    assert budget_embeds(config(rows, num_bytes), 1000, model()) == expected
