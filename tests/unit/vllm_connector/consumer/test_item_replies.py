"""Item replies: every message once, in whatever order its two halves become known."""

from dataclasses import replace

import pytest

from tests.support.vllm_connector.fake_engine import (
    INSTANCE,
    FakeMessageSender,
    fake_request,
    metadata,
    mm_hash,
)
from triptych_common.protocol.messages import Decision, ItemAck, Outcome, Preallocation
from triptych_vllm_connector.consumer.admission import Admission, make_admission
from triptych_vllm_connector.consumer.item_replies import DeclineReason, ItemReplies
from triptych_vllm_connector.consumer.local_encode import encodes_no_request
from triptych_vllm_connector.consumer.request_table import RequestTable
from triptych_vllm_connector.pieces import piece_hashes

A = mm_hash("a")
KEY = ("req-1", 0)


class Replies:
    """Item replies of requests with item A at each place; what each call sent, as (encoder, message)."""

    def __init__(self, capacity: int = 100) -> None:
        self.sender = FakeMessageSender()
        requests = RequestTable(INSTANCE, encodes_no_request, lambda: 0)
        self.replies = ItemReplies(INSTANCE, self.sender, requests, capacity)

    def on_metadata(self, *requesters: tuple[str, int], **fields: str) -> list[tuple[str, object]]:
        self.replies.on_metadata(metadata(A, *requesters, **fields))
        return list(self.sender.take())

    def grant(self, key: tuple[str, int] = KEY) -> list[tuple[str, object]]:
        admission = admission_of(key)
        self.replies.grant_item(admission, admission.features[key[1]])
        return list(self.sender.take())

    def decline(self, reason: DeclineReason, key: tuple[str, int] = KEY) -> list[tuple[str, object]]:
        admission = admission_of(key)
        self.replies.decline_item(admission, admission.features[key[1]], reason)
        return list(self.sender.take())

    def ack(self, outcome: Outcome, failure: str | None = None) -> list[tuple[str, object]]:
        admission = admission_of(KEY)
        admission.failure = failure
        self.replies.ack_item(admission, admission.features[KEY[1]], outcome)
        return list(self.sender.take())


def admission_of(key: tuple[str, int]) -> Admission:
    request = fake_request("r1", [(A, 1)] * (key[1] + 1), request_id=key[0])
    return make_admission("r1", request.mm_features, request.ec_transfer_params, 0)


def short(sent: list[tuple[str, object]]) -> list[tuple[str, str, str]]:
    """(encoder, job, decision or outcome)"""
    out: list[tuple[str, str, str]] = []
    for encoder, message in sent:
        assert isinstance(message, Preallocation | ItemAck)
        what = message.decision if isinstance(message, Preallocation) else message.outcome
        out.append((encoder, message.job_id, what))
    return out


@pytest.fixture
def replies() -> Replies:
    return Replies()


def test_request_first(replies: Replies) -> None:
    assert replies.grant() == []
    assert replies.ack(Outcome.INJECTED) == []
    assert short(replies.on_metadata(KEY)) == [
        ("encoder-0", "job-1", "declined"),  # it comes too late to be sent
        ("encoder-0", "job-1", "injected"),
    ]


def test_messages_name_request_item_job_and_reason(replies: Replies) -> None:
    replies.on_metadata(KEY)
    ((_, message),) = replies.decline("prefix_cached")
    assert message == Preallocation(
        request_id="req-1",
        item_index=0,
        job_id="job-1",
        mm_hash=A,
        prefill_decode=INSTANCE,
        decision=Decision.DECLINED,
        reason="prefix_cached",
    )
    ((_, message),) = replies.ack(Outcome.FAILED, "x" * 900)
    assert isinstance(message, ItemAck)
    assert message.detail == "x" * 500


def test_a_message_is_not_repeated(replies: Replies) -> None:
    replies.on_metadata(KEY)
    replies.grant()
    assert replies.grant() == []
    replies.ack(Outcome.INJECTED)
    assert replies.ack(Outcome.INJECTED) == []
    assert replies.ack(Outcome.SKIPPED) == []  # the first outcome counts


def test_a_decision_can_be_revoked_and_taken_again(replies: Replies) -> None:
    replies.on_metadata(KEY)
    sent = [*replies.grant(), *replies.decline("prefix_cached"), *replies.grant()]
    assert [what for _, _, what in short(sent)] == ["granted", "declined", "granted"]


def test_an_item_that_is_needed_again_gets_an_ack_again(replies: Replies) -> None:
    replies.on_metadata(KEY)
    replies.decline("prefix_cached")
    replies.ack(Outcome.SKIPPED)
    sent = [*replies.grant(), *replies.ack(Outcome.INJECTED)]
    assert [what for _, _, what in short(sent)] == ["granted", "injected"]


@pytest.mark.parametrize(
    ("outcome", "reason"), [(Outcome.INJECTED, "prefix_cached"), (Outcome.FAILED, "request_gone")]
)
def test_an_encoder_that_comes_after_the_ack_shall_not_send(
    replies: Replies, outcome: Outcome, reason: str
) -> None:
    replies.on_metadata(KEY)
    replies.grant()
    assert [what for _, _, what in short(replies.ack(outcome))] == [outcome]
    (_, decision), (_, ack) = replies.on_metadata(KEY, job_id="job-2", encoder="encoder-1")
    assert isinstance(decision, Preallocation)
    assert (decision.decision, decision.reason) == (Decision.DECLINED, reason)
    assert isinstance(ack, ItemAck)
    assert ack.outcome is outcome


def test_requesters_of_other_instances_are_not_ours(replies: Replies) -> None:
    assert replies.on_metadata(KEY, prefill_decode="pd-1") == []
    assert len(replies.replies) == 0


def test_it_is_bounded_and_forgets_the_oldest() -> None:
    replies = Replies(capacity=2)
    for index in range(3):
        replies.grant(("req-1", index))
    assert len(replies.replies) == 2
    assert replies.on_metadata(("req-1", 0)) == []
    assert short(replies.on_metadata(("req-1", 2))) == [("encoder-0", "job-1", "granted")]


class PieceReplies:
    """Replies about one item in three pieces, behind an image; what each call sent."""

    def __init__(self) -> None:
        self.sender = FakeMessageSender()
        requests = RequestTable(INSTANCE, encodes_no_request, lambda: 0)
        self.replies = ItemReplies(INSTANCE, self.sender, requests)
        image, *pieces = fake_request("r1", [(A, 1), *((each, 2) for each in PIECES)]).mm_features
        features = [image, *(replace(each, mm_hash=VIDEO) for each in pieces)]
        params = {"request_id": "req-1", "gateway": "gateway-0"}
        self.admission = make_admission("r1", features, params, 0)
        self.replies.on_metadata(metadata(VIDEO, ("req-1", 1)))

    def grant(self, *numbers: int) -> list[str]:
        for number in numbers:
            self.replies.grant_item(self.admission, self.admission.features[1 + number])
        return self._sent()

    def skip(self, *numbers: int) -> list[str]:
        for number in numbers:
            self.replies.skip_item(self.admission, self.admission.features[1 + number], "prefix_cached")
        return self._sent()

    def ack(self, *numbers: int, outcome: Outcome = Outcome.INJECTED) -> list[str]:
        for number in numbers:
            self.replies.ack_item(self.admission, self.admission.features[1 + number], outcome)
        return self._sent()

    def _sent(self) -> list[str]:
        sent = [message for _, message in self.sender.take()]
        for message in sent:
            assert isinstance(message, Preallocation | ItemAck)
            assert (message.mm_hash, message.item_index) == (VIDEO, 1)
        return [what for _, _, what in short([("encoder-0", message) for message in sent])]


VIDEO = mm_hash("d")
PIECES = piece_hashes(VIDEO, (2, 2, 2))


def test_an_item_of_which_the_prefix_cache_covers_some_pieces_is_needed() -> None:
    replies = PieceReplies()
    assert replies.skip(0, 1) == []
    assert replies.grant(2) == ["granted"]
    assert replies.ack(2) == ["injected"]


def test_an_item_of_which_the_prefix_cache_covers_all_pieces_is_declined() -> None:
    replies = PieceReplies()
    assert replies.skip(0, 1) == []
    assert replies.skip(2) == ["declined", "skipped"]


def test_a_piece_that_is_needed_again_takes_the_items_ack_back() -> None:
    """The request was preempted: its first piece is in the prefix cache, the others are loaded again."""
    replies = PieceReplies()
    replies.grant(0, 1, 2)
    assert replies.ack(0, 1) == []
    assert replies.grant(1, 2) == []
    assert replies.ack(2) == []
    assert replies.ack(1) == ["injected"]
