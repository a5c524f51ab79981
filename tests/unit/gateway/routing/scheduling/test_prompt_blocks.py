"""Blocks of prompts: alike as far as two prompts begin alike, and no further."""

import random

import pytest

from tests.support.gateway.routing import prompt
from triptych_common.protocol.ids import MmHash
from triptych_gateway.routing.scheduling.candidates import (
    ITEM_BYTES,
    MAX_PREFIX_BYTES,
    PromptBlocks,
    divide_prompt,
)

DOG, CAT = "d" * 64, "c" * 64
TEXT = random.Random(1).randbytes(5000)


def num_alike(one: PromptBlocks, other: PromptBlocks) -> int:
    """Bytes of the blocks that both begin with."""
    num_bytes = 0
    for left, right in zip(one.blocks, other.blocks, strict=False):
        if left != right:
            break
        num_bytes += left.num_bytes
    return num_bytes


def test_how_a_prompt_is_cut_into_texts_makes_no_difference() -> None:
    pieces = [TEXT[start : start + 37] for start in range(0, len(TEXT), 37)]
    assert prompt(*pieces) == prompt(TEXT)


@pytest.mark.parametrize("num_common", [0, 100, 128, 1000, 4900])
def test_prompts_are_alike_up_to_the_first_difference(num_common: int) -> None:
    """Less a part of one block."""
    one = prompt(TEXT[:num_common], b"x" * 500)
    other = prompt(TEXT[:num_common], b"y" * 500)
    assert num_common - 512 < num_alike(one, other) <= num_common


def test_an_item_is_part_of_the_prompt_by_its_hash() -> None:
    dog, cat = prompt(b"see", DOG, b"what?"), prompt(b"see", CAT, b"what?")
    assert num_alike(dog, cat) == 0
    assert num_alike(dog, prompt(b"see", DOG, b"why?")) == ITEM_BYTES + len(b"see")
    assert num_alike(dog, prompt(b"look", DOG, b"what?")) == 0, "text before an item changes what follows"


@pytest.mark.parametrize("seed", [("m", None, "other salt"), ("adapter", None, ""), ("m", "digest", "")])
def test_tenants_adapters_and_namespaces_share_nothing(seed: object) -> None:
    assert num_alike(prompt(TEXT, seed=("m", None, "")), prompt(TEXT, seed=seed)) == 0


def test_a_long_prompt_has_few_blocks_and_is_read_to_a_bound() -> None:
    assert len(divide_prompt([bytes(100_000)], "m").blocks) < 250
    read = []

    def parts() -> "list[bytes | MmHash]":
        read.append(None)
        return [bytes(MAX_PREFIX_BYTES // 4)] * 40

    found = divide_prompt(parts(), "m")
    assert found.num_bytes == MAX_PREFIX_BYTES
    assert len(found.blocks) < 600


def test_blocks_cover_no_more_than_the_prompt() -> None:
    found = prompt(TEXT, DOG, TEXT)
    assert found.num_bytes - 512 < sum(block.num_bytes for block in found.blocks) <= found.num_bytes
    assert prompt() == PromptBlocks()
