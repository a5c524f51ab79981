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
