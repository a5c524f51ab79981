"""The conversation with the encoders: every word once, in whatever order its two halves become known."""

import pytest

from tests.support.fake_engine import INSTANCE, metadata, mm_hash
from triptych_common.protocol.messages import Decision, ItemAck, Outcome, Preallocation
from triptych_vllm_connector.consumer.item_replies import Addressed, Conversation

A = mm_hash("a")
KEY = ("req-1", 0)


def said(words: list[Addressed]) -> list[tuple[str, str, str]]:
    """(encoder, job, decision or outcome)"""
    return [
        (
            word.encoder,
            word.message.job_id,
            word.message.decision if isinstance(word.message, Preallocation) else word.message.outcome,
        )
        for word in words
    ]


def test_metadata_first() -> None:
    conversation = Conversation(INSTANCE)
    assert conversation.metadata(metadata(A, KEY)) == []
    assert said(conversation.decided(KEY, A, Decision.GRANTED)) == [("encoder-0", "job-1", "granted")]
    assert said(conversation.ended(KEY, A, Outcome.INJECTED)) == [("encoder-0", "job-1", "injected")]


def test_request_first() -> None:
    conversation = Conversation(INSTANCE)
    assert conversation.decided(KEY, A, Decision.GRANTED) == []
    assert conversation.ended(KEY, A, Outcome.INJECTED) == []
    assert said(conversation.metadata(metadata(A, KEY))) == [
        ("encoder-0", "job-1", "declined"),  # it comes too late to be sent
        ("encoder-0", "job-1", "injected"),
    ]


def test_the_words_name_request_item_job_and_reason() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    (word,) = conversation.decided(KEY, A, Decision.DECLINED, "prefix_cached")
    assert word.message == Preallocation(
        request_id="req-1",
        item_index=0,
        job_id="job-1",
        mm_hash=A,
        prefill_decode=INSTANCE,
        decision=Decision.DECLINED,
        reason="prefix_cached",
    )
    (word,) = conversation.ended(KEY, A, Outcome.FAILED, "x" * 900)
    assert isinstance(word.message, ItemAck)
    assert word.message.detail == "x" * 500


def test_a_word_is_not_repeated() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.decided(KEY, A, Decision.GRANTED)
    assert conversation.decided(KEY, A, Decision.GRANTED) == []
    conversation.ended(KEY, A, Outcome.INJECTED)
    assert conversation.ended(KEY, A, Outcome.INJECTED) == []
    assert conversation.ended(KEY, A, Outcome.SKIPPED) == []  # the first last word counts


def test_a_decision_can_be_revoked_and_taken_again() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    words = [
        *conversation.decided(KEY, A, Decision.GRANTED),
        *conversation.decided(KEY, A, Decision.DECLINED, "prefix_cached"),
        *conversation.decided(KEY, A, Decision.GRANTED),
    ]
    assert [word for _, _, word in said(words)] == ["granted", "declined", "granted"]


def test_an_item_that_is_needed_again_gets_a_last_word_again() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.decided(KEY, A, Decision.DECLINED, "prefix_cached")
    conversation.ended(KEY, A, Outcome.SKIPPED)
    words = [*conversation.decided(KEY, A, Decision.GRANTED), *conversation.ended(KEY, A, Outcome.INJECTED)]
    assert [word for _, _, word in said(words)] == ["granted", "injected"]


def test_an_encoder_that_took_the_job_over_hears_everything() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.decided(KEY, A, Decision.GRANTED)
    assert said(conversation.metadata(metadata(A, KEY, encoder="encoder-1"))) == [
        ("encoder-1", "job-1", "granted")
    ]
    assert said(conversation.ended(KEY, A, Outcome.INJECTED)) == [
        ("encoder-0", "job-1", "injected"),  # it was only slow: it waits for the last word too
        ("encoder-1", "job-1", "injected"),
    ]


def test_a_job_that_was_delivered_again_is_answered_again() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.ended(KEY, A, Outcome.SKIPPED)
    assert [word for _, _, word in said(conversation.metadata(metadata(A, KEY)))] == ["skipped"]


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Outcome.INJECTED, "prefix_cached"), (Outcome.FAILED, "request_gone")]
)
def test_an_encoder_that_comes_after_the_last_word_shall_not_send(outcome: Outcome, reason: str) -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.decided(KEY, A, Decision.GRANTED)
    assert [word for _, _, word in said(conversation.ended(KEY, A, outcome))] == [outcome]
    decision, ack = conversation.metadata(metadata(A, KEY, job_id="job-2", encoder="encoder-1"))
    assert isinstance(decision.message, Preallocation)
    assert (decision.message.decision, decision.message.reason) == (Decision.DECLINED, reason)
    assert isinstance(ack.message, ItemAck)
    assert ack.message.outcome is outcome


def test_two_jobs_for_the_same_item_are_both_answered() -> None:
    conversation = Conversation(INSTANCE)
    conversation.metadata(metadata(A, KEY))
    conversation.decided(KEY, A, Decision.GRANTED)
    words = conversation.metadata(metadata(A, KEY, job_id="job-2", encoder="encoder-1"))
    assert said(words) == [("encoder-1", "job-2", "granted")]
    assert said(conversation.ended(KEY, A, Outcome.INJECTED)) == [
        ("encoder-0", "job-1", "injected"),
        ("encoder-1", "job-2", "injected"),
    ]


def test_one_metadata_for_several_requesters_of_ours() -> None:
    conversation = Conversation(INSTANCE)
    conversation.decided(("req-1", 0), A, Decision.GRANTED)
    conversation.decided(("req-2", 3), A, Decision.DECLINED, "request_gone")
    words = conversation.metadata(metadata(A, ("req-1", 0), ("req-2", 3)))
    assert [word for _, _, word in said(words)] == ["granted", "declined"]


def test_requesters_of_other_instances_are_not_ours() -> None:
    conversation = Conversation(INSTANCE)
    assert conversation.metadata(metadata(A, KEY, prefill_decode="pd-1")) == []
    assert len(conversation) == 0


def test_nobody_is_told_about_an_item_that_nobody_encodes() -> None:
    conversation = Conversation(INSTANCE)
    assert conversation.decided(KEY, A, Decision.GRANTED) == []
    assert conversation.ended(KEY, A, Outcome.INJECTED) == []


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    conversation = Conversation(INSTANCE, capacity=2)
    for index in range(3):
        conversation.decided(("req-1", index), A, Decision.GRANTED)
    assert len(conversation) == 2
    assert conversation.metadata(metadata(A, ("req-1", 0))) == []
    assert said(conversation.metadata(metadata(A, ("req-1", 2)))) == [("encoder-0", "job-1", "granted")]
