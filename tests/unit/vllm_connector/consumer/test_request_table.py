"""The request table: the only module that changes admissions."""

import pytest

from tests.support.vllm_connector.fake_engine import INSTANCE, fake_request, mm_hash
from triptych_common.domain.errors import IllegalTransitionError
from triptych_vllm_connector.consumer.admission import Admission, AdmissionState
from triptych_vllm_connector.consumer.local_encode import encodes_no_request
from triptych_vllm_connector.consumer.request_table import RequestTable

A, B = mm_hash("a"), mm_hash("b")


@pytest.fixture
def table() -> RequestTable:
    return RequestTable(INSTANCE, encodes_no_request, lambda: 0)


@pytest.fixture
def admission(table: RequestTable) -> Admission:
    """Of a request with A at its first and last place."""
    return table.open_request(fake_request("r1", [(A, 4), (B, 6), (A, 4)]))


def test_an_item_is_done_with_when_its_last_granted_place_is(
    table: RequestTable, admission: Admission
) -> None:
    table.ask_places(admission, {0, 1, 2})
    table.grant_place(admission, 0)
    table.grant_place(admission, 2)
    table.grant_place(admission, 2)
    assert not table.drop_place(admission, 0)
    assert not table.drop_place(admission, 1)  # was never granted
    assert table.drop_place(admission, 2)
    assert not table.drop_place(admission, 2)
    assert admission.asked == set()


def test_a_lost_item_is_lost_at_all_its_places(table: RequestTable, admission: Admission) -> None:
    table.ask_places(admission, {0, 1, 2})
    for index in range(3):
        table.grant_place(admission, index)
    table.drop_item(admission, A)
    assert admission.granted == {1}
    assert table.drop_place(admission, 1)


def test_the_state_follows_the_places(table: RequestTable, admission: Admission) -> None:
    assert admission.state is AdmissionState.NEW
    table.ask_places(admission, {0, 1, 2})
    assert admission.state is AdmissionState.QUEUED
    table.grant_place(admission, 0)
    assert admission.state is AdmissionState.GRANTED
    table.drop_place(admission, 0)  # item by item: it waits for the rest
    assert admission.state is AdmissionState.QUEUED
    table.grant_place(admission, 1)
    table.drop_place(admission, 1)
    table.drop_place(admission, 2)
    assert admission.state is AdmissionState.NEW


def test_a_place_that_was_not_asked_for_cannot_be_granted(table: RequestTable, admission: Admission) -> None:
    with pytest.raises(IllegalTransitionError):
        table.grant_place(admission, 0)
    assert admission.granted == set()


@pytest.mark.parametrize("num_granted", [0, 1, 3])
def test_a_failed_request_keeps_what_it_holds_and_waits_for_nothing(
    table: RequestTable, admission: Admission, num_granted: int
) -> None:
    table.ask_places(admission, {0, 1, 2})
    for index in range(num_granted):
        table.grant_place(admission, index)
    assert table.mark_failed(admission, "first")
    assert not table.mark_failed(admission, "second")
    assert (admission.state, admission.failure) == (AdmissionState.FAILED, "first")
    assert admission.asked == admission.granted == set(range(num_granted))
    for index in range(num_granted):
        table.drop_place(admission, index)
    assert admission.has_failed
    assert table.take_failed_ids() == {"r1"}
    assert table.take_to_wake() == ["r1"]


def test_a_request_that_cannot_be_served_has_failed_when_it_is_opened(table: RequestTable) -> None:
    assert table.open_request(fake_request("r2", [("cat-1", 4)])).has_failed
    assert table.take_failed_ids() == {"r2"}


def test_siblings_are_engine_requests_of_one_request(table: RequestTable) -> None:
    first, second = (fake_request(f"{n}_r", [(A, 4)], request_id="r") for n in range(2))
    one, other = table.open_request(first), table.open_request(second)
    assert table.has_sibling(one)
    assert table.has_sibling(other)
    assert table.close_request(first) is one
    assert not table.has_sibling(other)
    assert table.has_sibling(table.admission_of_unopened(first))
    assert table.close_request(first) is None
    table.close_request(second)
    assert len(table) == 0
