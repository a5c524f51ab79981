"""Prompt chunks: decoding keeps its share of the time, whatever prompts and steps cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_vllm_connector.scheduler.prompt_chunks import CHUNK_SIZES, NUM_REMEMBERED, PromptChunks

SMALLEST, LARGEST = CHUNK_SIZES[0], CHUNK_SIZES[-1]


def chunks_after(decode_share: float, decode_s: float, prompt_token_s: float) -> PromptChunks:
    """Such steps were measured."""
    chunks = PromptChunks(decode_share)
    chunks.note_step(0, 3, decode_s)
    chunks.note_step(64, 3, decode_s + 64 * prompt_token_s)
    return chunks


def test_nothing_is_bounded_before_costs_are_known() -> None:
    chunks = PromptChunks(0.5)
    assert chunks.max_prompt_tokens() is None
    chunks.note_step(64, 0, 0.064)
    assert chunks.max_prompt_tokens() is None
    chunks.note_step(0, 1, 0.1)
    assert chunks.max_prompt_tokens() == 96


@pytest.mark.parametrize(
    ("decode_share", "expected"), [(0.5, 96), (0.2, 384), (0.8, SMALLEST), (0.01, 8192), (0.99, SMALLEST)]
)
def test_decoding_keeps_its_share(decode_share: float, expected: int) -> None:
    """Decoding takes 100 ms, a token of a prompt 1 ms."""
    assert chunks_after(decode_share, 0.1, 0.001).max_prompt_tokens() == expected


def test_without_a_share_nothing_is_bounded() -> None:
    assert chunks_after(0.0, 0.1, 0.001).max_prompt_tokens() is None


@given(share=st.floats(0.05, 0.95), decode_s=st.floats(1e-4, 1.0), prompt_token_s=st.floats(1e-6, 1e-2))
def test_no_chunk_takes_more_than_the_rest_unless_it_is_the_smallest(
    share: float, decode_s: float, prompt_token_s: float
) -> None:
    num_tokens = chunks_after(share, decode_s, prompt_token_s).max_prompt_tokens()
    assert num_tokens in CHUNK_SIZES
    if num_tokens > SMALLEST:
        assert num_tokens * prompt_token_s <= decode_s * (1 - share) / share * 1.001
    if num_tokens < LARGEST:
        assert 2 * num_tokens * prompt_token_s > decode_s * (1 - share) / share * 0.999, "none is wasted"


def test_a_tail_of_a_prompt_says_nothing_of_what_tokens_cost() -> None:
    chunks = chunks_after(0.5, 0.1, 0.001)
    for _ in range(NUM_REMEMBERED):
        chunks.note_step(1, 3, 0.15)
    assert chunks.max_prompt_tokens() == 96


def test_it_follows_what_steps_cost_now() -> None:
    chunks = chunks_after(0.5, 0.1, 0.001)
    for _ in range(NUM_REMEMBERED):
        chunks.note_step(96, 3, 0.1 + 96 * 0.002)  # the cores that it had borrowed are gone
    assert chunks.max_prompt_tokens() == 48


def test_one_slow_step_changes_nothing() -> None:
    chunks = chunks_after(0.5, 0.1, 0.001)
    for seconds in (0.196, 0.196, 0.196, 9.0):
        chunks.note_step(96, 3, seconds)
    assert chunks.max_prompt_tokens() == 96


def test_a_step_that_costs_no_more_than_decoding_is_no_fault() -> None:
    chunks = chunks_after(0.5, 0.1, 0.0)
    assert chunks.max_prompt_tokens() == LARGEST
