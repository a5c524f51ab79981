"""What a namespace takes in a request: what all of its engines take."""

import pytest

from triptych_common.protocol.messages import InstanceRecord, Modality, Role
from triptych_gateway.routing.pairs import common_limits, widest_limits

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO


@pytest.mark.parametrize(
    ("announced", "limits"),
    [
        ([], {}),
        ([{}], {}),
        ([{IMAGE: 3, VIDEO: 1}], {IMAGE: 3, VIDEO: 1}),
        ([{IMAGE: 3, VIDEO: 1}, {IMAGE: 2, VIDEO: 4}], {IMAGE: 2, VIDEO: 1}),
        ([{IMAGE: 3, VIDEO: 1}, {IMAGE: 5}, {}], {IMAGE: 3}),
    ],
)
def test_what_all_take(announced: list[dict[Modality, int]], limits: dict[Modality, int]) -> None:
    assert common_limits(records_of(announced)) == limits


@pytest.mark.parametrize(
    ("announced", "limits"),
    [
        ([], {}),
        ([{}], {}),
        ([{IMAGE: 3, VIDEO: 1}, {IMAGE: 5}], {IMAGE: 5, VIDEO: 1}),
        ([{IMAGE: 3}, {}], {}),
    ],
)
def test_what_some_take(announced: list[dict[Modality, int]], limits: dict[Modality, int]) -> None:
    """One that says nothing may take anything."""
    assert widest_limits(records_of(announced)) == limits


def records_of(announced: list[dict[Modality, int]]) -> list[InstanceRecord]:
    return [
        InstanceRecord(instance=f"e-{number}", boot_id="b", role=Role.ENCODE, item_limits=each)
        for number, each in enumerate(announced)
    ]
