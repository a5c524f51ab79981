"""Admission records: what a request needs, by place, and its states."""

from tests.support.vllm_connector.fake_engine import fake_request, mm_hash
from triptych_vllm_connector.consumer.admission import (
    Admission,
    make_admission,
)
from triptych_vllm_connector.consumer.preallocator import Need

A, B = mm_hash("a"), mm_hash("b")


def admission_of(*items: tuple[str, int]) -> Admission:
    request = fake_request("r1", list(items))
    return make_admission("r1", request.mm_features, request.ec_transfer_params, 5)


def test_it_is_made_from_the_requests_features_and_its_transfer_params() -> None:
    admission = admission_of((A, 4), (B, 6))
    assert [(f.item_index, f.mm_hash, f.num_embeds, f.end) for f in admission.features] == [
        (0, A, 4, 8),
        (1, B, 6, 18),
    ]
    assert (admission.request_id, admission.gateway, admission.first_seen_ns) == ("wire-r1", "gateway-0", 5)
    assert admission.last_end == 18


def test_a_request_without_transfer_params_has_vllms_id_alone() -> None:
    admission = make_admission("r1", fake_request("r1", [(A, 1)]).mm_features, None, 0)
    assert (admission.request_id, admission.gateway, admission.traceparent) == ("r1", None, None)


def test_needs_are_the_places_that_the_kv_cache_does_not_cover_whole() -> None:
    admission = admission_of((A, 4), (B, 6), (A, 4))
    assert admission.needs_after(0) == [Need(A, 4, 0), Need(B, 6, 1), Need(A, 4, 2)]
    assert admission.needs_after(7) == admission.needs_after(0)  # the last token of the first is missing
    assert admission.needs_after(8) == [Need(B, 6, 1), Need(A, 4, 2)]
    assert [feature.item_index for feature in admission.covered_by(18)] == [0, 1]
    assert admission.needs_after(admission.last_end) == []
