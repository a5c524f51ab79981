"""How many engines of each role: what is left open, and what could not answer."""

import pytest

from triptych_cli.options import SystemOptions
from triptych_cli.roles import TOPOLOGIES, RoleCounts


def counts(encoders: int | None = None, prefill_decodes: int | None = None, **others: int) -> RoleCounts:
    return SystemOptions("m", encoders, prefill_decodes, None, 8000, None, "", "", **others).counts()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, TOPOLOGIES["e+pd"]),
        ({"prefills": 1, "decodes": 1}, TOPOLOGIES["e+p+d"]),
        ({"encode_prefills": 1, "decodes": 1}, TOPOLOGIES["ep+d"]),
        ({"encode_prefill_decodes": 1}, TOPOLOGIES["epd"]),
        ({"encoders": 0}, RoleCounts(prefill_decodes=1)),
        ({"prefills": 2, "decodes": 2, "prefill_decodes": 3}, RoleCounts(1, 3, 2, 2)),
        ({"encoders": 2, "encode_prefill_decodes": 1}, RoleCounts(2, encode_prefill_decodes=1)),
    ],
)
def test_what_is_left_open_fits_the_rest(given: dict[str, int], expected: RoleCounts) -> None:
    assert counts(**given) == expected


@pytest.mark.parametrize("topology", TOPOLOGIES.values())
def test_the_named_ones_work(topology: RoleCounts) -> None:
    assert topology.fault(has_tower=False) is None


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        (RoleCounts(), "--prefill-decodes"),
        (RoleCounts(encoders=1), "--prefill-decodes"),
        (RoleCounts(encoders=1, prefills=1), "--decodes"),
        (RoleCounts(encoders=1, prefill_decodes=1, decodes=1), "--prefills"),
        (RoleCounts(prefill_decodes=1), "--local-encode"),
        (RoleCounts(prefills=1, decodes=1), "--local-encode"),
    ],
)
def test_what_could_not_answer_is_refused(wrong: RoleCounts, remedy: str) -> None:
    fault = wrong.fault(has_tower=False)
    assert fault is not None
    assert remedy in fault


def test_a_tower_of_its_own_is_enough() -> None:
    assert RoleCounts(prefill_decodes=1).fault(has_tower=True) is None
