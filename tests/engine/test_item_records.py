"""Records of items on a real prefill_decode: one that is not of its model costs its own request alone."""

from array import array
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from tests.support.real.inspection import prefill_decode_url
from tests.support.real.system import MODEL, System
from triptych_common.protocol.item_record import MAX_ARRAY_BYTES, PackedArray

pytestmark = pytest.mark.engine

PAD = Tokenizer.from_file(str(MODEL / "tokenizer.json")).token_to_id("<|image_pad|>")
HASH = "a" * 64
NUM_EMBEDS = 4
TIMEOUT_S = 60


def packed(kind: str, dtype: Any, *values: int) -> dict[str, Any]:
    """Of numbers, by their `array` type code."""
    return PackedArray.pack(dtype, (len(values),), array(kind, values).tobytes()).model_dump(mode="json")


def grid(*values: int) -> dict[str, Any]:
    value = packed("q", "int64", *values)
    return {"name": "image_grid_thw", "batching": "batched", "keep_on_cpu": True, "value": value}


def update(*tokens: int, **fields: Any) -> dict[str, Any]:
    return {"mode": "replace", "target": [PAD], "tokens": packed("i", "int32", *tokens), **fields}


def record(fields: list[Any] | None = None, updates: list[Any] | None = None) -> dict[str, Any]:
    fields = [grid(1, 4, 4)] if fields is None else fields
    return {"fields": fields, "updates": updates or [update(*[PAD] * NUM_EMBEDS)]}


BOMB = {"dtype": "uint8", "shape": [MAX_ARRAY_BYTES + 1], "data": ""}
HOSTILE: dict[str, Any] = {
    "none": None,
    "another version": record() | {"version": 2},
    "code": record() | {"code": "import os"},
    "no grid": record([]),
    "a grid of other tokens": record([grid(1, 4, 6)]),
    "a grid of one row of patches": record([grid(1, 1, 16)]),
    "a grid of two numbers": record([grid(4, 4)]),
    "a grid of nothing": record([grid(0, 0, 0)]),
    "a grid below nothing": record([grid(-1, -4, 4)]),
    "a grid that fills the memory": record([grid(1 << 20, 1 << 20, 1 << 20)]),
    "a grid of lists": record([grid(1, 4, 4) | {"value": [1, 4, 4]}, {**grid(1, 4, 4), "name": "x"}]),
    "tokens beyond the vocabulary": record(updates=[update(1 << 30, 1 << 30, 1 << 30, 1 << 30)]),
    "tokens below nothing": record(updates=[update(-1, -1, -1, -1)]),
    "fewer tokens": record(updates=[update(PAD)]),
    "more tokens than the context": record(updates=[update(*[PAD] * 100_000)]),
    "a mask of fewer rows": record(updates=[update(*[PAD] * 4, is_embed=packed("b", "bool", 1, 0, 0, 0))]),
    "a target that is not there": record(updates=[update(*[PAD] * 4, target=[3, 3, 3])]),
    "an array too large": record([grid(1, 4, 4) | {"value": BOMB}]),
    "an array that is shorter": record([grid(1, 4, 4) | {"value": packed("q", "int64", 1) | {"shape": [3]}}]),
}


def test_hostile_records_are_refused_one_by_one(system: System) -> None:
    url, pid = prefill_decode_url(system), system.service_pid("prefill_decode-0")
    answers = {}
    for name, each in HOSTILE.items():
        item = {
            "item_index": 0, "mm_hash": HASH, "modality": "image", "num_embeds": NUM_EMBEDS, "record": each
        }  # fmt: skip
        parts = [{"type": "image_embeds", "image_embeds": None, "uuid": HASH}, {"type": "text", "text": "x"}]
        body = {
            "model": MODEL.name,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": parts}],
            "ec_transfer_params": {
                "request_id": "r", "gateway": "nobody", "remaining_ms": 1000, "items": [item]
            },
        }  # fmt: skip
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S, trust_env=False)
        answers[name] = reply.status_code
    assert answers == dict.fromkeys(HOSTILE, httpx.codes.BAD_REQUEST)
    assert system.ask("still there?").token_ids
    assert system.service_pid("prefill_decode-0") == pid
