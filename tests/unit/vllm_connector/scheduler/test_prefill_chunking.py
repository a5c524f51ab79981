"""Prompt chunks: decoding keeps its share of the time, whatever prompts and steps cost."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych_vllm_connector.scheduler.prefill_chunking import (
    CHUNK_SIZES,
    FIRST_CHUNK,
    MAX_AGE_STEPS,
    MAX_LOOKS,
    NUM_REMEMBERED,
    PrefillChunking,
)

SMALLEST, LARGEST = CHUNK_SIZES[0], CHUNK_SIZES[-1]


@dataclass
class Engine:
    """What its steps take, in seconds."""

    decode: float = 0.1
    request: float = 0.0  # for each that decodes
    token: float = 0.001
    prompt_step: float = 0.0  # once for each step with a prompt

    def step(self, chunks: PrefillChunking, num_decoding: int) -> int:
        """With prompts without end. Returns how many of their tokens it took."""
        most = chunks.max_prompt_tokens(num_decoding)
        assert most is not None
        chunks.note_step(most, num_decoding, self.seconds(most, num_decoding))
        return most

    def seconds(self, num_prompt_tokens: int, num_decoding: int) -> float:
        decoding = self.decode + self.request * num_decoding if num_decoding else 0.0
        prompts = self.prompt_step + self.token * num_prompt_tokens if num_prompt_tokens else 0.0
        return decoding + prompts

    def settle(self, chunks: PrefillChunking, num_decoding: int) -> int:
        """The chunk after some steps."""
        return [self.step(chunks, num_decoding) for _ in range(3 * NUM_REMEMBERED)][-1]


def test_nothing_is_bounded_without_a_share_or_while_nothing_decodes() -> None:
    assert PrefillChunking(0.0).max_prompt_tokens(3) is None
    assert PrefillChunking(0.5).max_prompt_tokens(0) is None


def test_while_flows_take_turns_a_step_of_prompts_alone_is_bounded_by_its_time() -> None:
    chunks, engine = PrefillChunking(0.3), Engine(token=0.0005)
    assert chunks.max_turn_tokens() is None, "nothing is known of what tokens cost"
    for num_tokens in (2048, 512, 64, 32):
        chunks.note_step(num_tokens, 0, engine.seconds(num_tokens, 0))
    assert chunks.max_turn_tokens() == 96
    assert PrefillChunking(0.0).max_turn_tokens() is None


def test_a_late_prompt_has_a_longer_step_by_what_its_tokens_cost() -> None:
    chunks = PrefillChunking(0.3)
    one_core, both = Engine(token=0.001), Engine(token=0.0005)
    for num_tokens in (512, 64) * NUM_REMEMBERED:
        chunks.note_step(num_tokens, 0, one_core.seconds(num_tokens, 0))
    assert (chunks.max_turn_tokens(), chunks.max_turn_tokens(is_late=True)) == (48, 128), "none was late yet"
    for num_tokens in (512, 64):
        chunks.note_step(num_tokens, 0, both.seconds(num_tokens, 0), is_late=True)
    assert (chunks.max_turn_tokens(), chunks.max_turn_tokens(is_late=True)) == (48, 256)


def test_a_late_prompt_leaves_decoding_its_share() -> None:
    chunks, both = PrefillChunking(0.5), Engine(token=0.0005)
    Engine().settle(chunks, 3)
    for num_tokens in (512, 64):
        chunks.note_step(num_tokens, 3, both.seconds(num_tokens, 3), is_late=True)
    assert (chunks.max_prompt_tokens(3), chunks.max_prompt_tokens(3, is_late=True)) == (96, 192)


def test_steps_without_a_prompt_show_what_decoding_costs_and_then_it_is_asked_no_more() -> None:
    chunks, engine = PrefillChunking(0.5), Engine()
    assert engine.step(chunks, 3) == 0
    assert engine.step(chunks, 3) == FIRST_CHUNK
    assert engine.step(chunks, 2) == 96, "as many as three, in powers of two"
    assert engine.step(chunks, 4) == 0, "more decode than were seen"


def test_looks_that_show_nothing_do_not_stop_the_prompts() -> None:
    """Two steps in flight, or requests that are about to end."""
    chunks = PrefillChunking(0.5)
    assert [chunks.max_prompt_tokens(3) for _ in range(MAX_LOOKS + 1)] == [0] * MAX_LOOKS + [FIRST_CHUNK]


def test_it_looks_again_after_many_steps() -> None:
    chunks, engine = PrefillChunking(0.5), Engine()
    taken = [engine.step(chunks, 3) for _ in range(2 * MAX_AGE_STEPS)]
    assert taken.count(0) == 2


@pytest.mark.parametrize("num_decoding", [1, 8, 64])
def test_the_share_holds_for_any_number_of_requests_after_a_backlog_of_another(num_decoding: int) -> None:
    chunks, engine = PrefillChunking(0.3), Engine(decode=0.05, request=0.008)
    for before in (64, 1):
        engine.settle(chunks, before)
    chunk = engine.settle(chunks, num_decoding)
    share = engine.seconds(0, num_decoding) / engine.seconds(chunk, num_decoding)
    assert 0.25 <= share <= 0.5, chunk


def test_where_a_step_costs_much_for_itself_chunks_are_no_smaller_than_that_is_worth() -> None:
    engine = Engine(decode=0.005, token=0.00002, prompt_step=0.02)
    chunks = PrefillChunking(0.3)
    for num_tokens in (2048, 512, 64, 32):  # prompts while nothing decoded
        chunks.note_step(num_tokens, 0, engine.seconds(num_tokens, 0))
    chunk = engine.settle(chunks, 8)
    assert chunk * engine.token >= engine.prompt_step / 2


@given(share=st.floats(0.05, 0.95), decode=st.floats(1e-4, 1.0), token=st.floats(1e-6, 1e-2))
def test_no_chunk_takes_more_than_the_rest_unless_it_is_the_smallest(
    share: float, decode: float, token: float
) -> None:
    num_tokens = Engine(decode=decode, token=token).settle(PrefillChunking(share), 3)
    assert num_tokens in CHUNK_SIZES
    if num_tokens > SMALLEST:
        assert num_tokens * token <= decode * (1 - share) / share * 1.001
    if num_tokens < LARGEST:
        assert 2 * num_tokens * token > decode * (1 - share) / share * 0.999, "none is wasted"


def test_a_tail_of_a_prompt_says_nothing_of_what_tokens_cost() -> None:
    chunks = PrefillChunking(0.5)
    Engine().settle(chunks, 3)
    for _ in range(NUM_REMEMBERED):
        chunks.note_step(1, 3, 0.15)
    assert chunks.max_prompt_tokens(3) == 96


def test_it_follows_what_steps_cost_now() -> None:
    chunks = PrefillChunking(0.5)
    Engine().settle(chunks, 3)
    assert Engine(token=0.002).settle(chunks, 3) == 48, "the cores that it had borrowed are gone"


def test_one_slow_step_changes_nothing() -> None:
    chunks = PrefillChunking(0.5)
    Engine().settle(chunks, 3)
    chunks.note_step(96, 3, 9.0)
    assert chunks.max_prompt_tokens(3) == 96


def test_a_step_that_costs_no_more_than_decoding_is_no_fault() -> None:
    assert Engine(token=0.0).settle(PrefillChunking(0.5), 3) == LARGEST
