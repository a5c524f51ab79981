"""How many engines of each role: what is left open, and what could not answer."""

import pytest

from triptych_cli.options import HostOptions, SystemOptions
from triptych_cli.roles import TOPOLOGIES, RoleCounts, is_named


def counts(encoders: int | None = None, prefill_decodes: int | None = None, **others: object) -> RoleCounts:
    return SystemOptions("m", encoders, prefill_decodes, None, 8000, None, "", "", **others).counts()


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


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, TOPOLOGIES["e+pd"]),
        ({"encoders": 2}, RoleCounts(encoders=2)),
        ({"prefill_decodes": 1}, RoleCounts(prefill_decodes=1)),
        ({"encoders": 1, "decodes": 2}, RoleCounts(encoders=1, decodes=2)),
    ],
)
def test_one_that_joins_starts_what_it_is_asked_for(given: dict[str, int], expected: RoleCounts) -> None:
    assert counts(**given, hosts=HostOptions(joins=True)) == expected


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("encoder", ["encoder-0", "encoder-b-0"]),
        ("encoder-b-0", ["encoder-b-0"]),
        ("prefill", ["prefill-0"]),
        ("store", ["store-b"]),
    ],
)
def test_a_kind_of_service_names_all_of_it(wanted: str, names: list[str]) -> None:
    known = ["encoder-0", "encoder-b-0", "prefill-0", "prefill_decode-0", "store-b", "cache_store-0"]
    assert [name for name in known if is_named(name, wanted)] == names


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
