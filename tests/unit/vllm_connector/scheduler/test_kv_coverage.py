"""Which requests an engine that decodes may take."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import PlaceholderRange

from triptych_vllm_connector.scheduler.kv_refusals import KvReads, covers_items


def feature(offset: int, length: int, is_embed: list[bool] | None = None) -> Any:
    mask = None if is_embed is None else torch.tensor(is_embed)
    return SimpleNamespace(mm_position=PlaceholderRange(offset=offset, length=length, is_embed=mask))


@pytest.mark.parametrize(
    ("num_computed_tokens", "is_covered"), [(0, False), (9, False), (13, False), (14, True), (20, True)]
)
def test_an_item_is_covered_when_none_of_it_is_left(num_computed_tokens: int, is_covered: bool) -> None:
    assert covers_items([feature(4, 10)], num_computed_tokens, 20) is is_covered


def test_every_item_counts() -> None:
    assert not covers_items([feature(0, 4), feature(10, 4)], 4, 20)
    assert covers_items([feature(0, 4), feature(10, 4)], 14, 20)


def test_tokens_around_an_item_may_be_computed() -> None:
    """Those of its placeholder that stand for no row."""
    assert covers_items([feature(0, 4, [False, True, True, False])], 3, 20)
    assert not covers_items([feature(0, 4, [False, True, True, False])], 2, 20)


def test_the_last_token_is_computed_again() -> None:
    assert not covers_items([feature(16, 4)], 20, 20), "it is the item's"
    assert covers_items([feature(16, 4, [True, True, True, False])], 20, 20)


def params(engine: str, request: str) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_engine_id": engine, "remote_request_id": request}


def test_only_the_last_ones_are_remembered() -> None:
    reads = KvReads(max_remembered=2)
    assert all(reads.name(params("e", name)) for name in "abc")
    assert reads.name(params("e", "a"))
    assert not reads.name(params("e", "c"))
