"""What each engine of a host owns, for machines of every size."""

import pytest

from triptych_common.cores.plan import CORES_PER_SPARE_CORE, plan_cores, shared_cores, team_size

CASES = [
    # encoders, prefill_decodes, cores, shares
    (1, 1, 1, [1, 1]),
    (1, 1, 2, [1, 1]),
    (1, 1, 3, [1, 2]),
    (1, 1, 4, [2, 2]),
    (2, 1, 4, [1, 1, 2]),
    (1, 2, 4, [1, 2, 1]),
    (1, 1, 16, [7, 7]),
    (2, 2, 16, [3, 3, 4, 4]),
    (1, 1, 64, [28, 28]),
    (3, 1, 2, [1, 1, 1, 1]),
    (0, 1, 2, [2]),
    (0, 0, 4, []),
    (1, 1, 0, [0, 0]),
]


@pytest.mark.parametrize(("num_encoders", "num_prefill_decodes", "num_cores", "shares"), CASES)
def test_shares(num_encoders: int, num_prefill_decodes: int, num_cores: int, shares: list[int]) -> None:
    owned = plan_cores(num_encoders, num_prefill_decodes, range(num_cores))
    assert [len(own) for own in owned] == shares


@pytest.mark.parametrize("num_cores", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("num_prefill_decodes", [1, 2, 5, 8])
@pytest.mark.parametrize("num_encoders", [0, 1, 2, 3, 8])
def test_every_engine_has_a_core_and_none_is_owned_twice_while_there_are_enough(
    num_encoders: int, num_prefill_decodes: int, num_cores: int
) -> None:
    cores = range(100, 100 + num_cores)
    owned = plan_cores(num_encoders, num_prefill_decodes, cores)
    num_engines = num_encoders + num_prefill_decodes
    shares = [len(own) for own in owned]
    all_owned = [core for own in owned for core in own]
    assert len(owned) == num_engines
    assert min(shares) >= 1
    assert max(shares) - min(shares) <= 1
    assert set(all_owned) <= set(cores)
    if num_engines <= num_cores:
        assert len(set(all_owned)) == len(all_owned) >= num_cores - num_cores // CORES_PER_SPARE_CORE
    else:
        assert set(all_owned) == set(cores)


@pytest.mark.parametrize("num_cores", [1, 2, 4, 8, 16, 64])
@pytest.mark.parametrize("num_engines", [1, 2, 3, 7])
def test_engines_share_what_they_own_and_no_spare_core(num_engines: int, num_cores: int) -> None:
    cores = range(100, 100 + num_cores)
    owned = plan_cores(1, num_engines, cores)
    everything = {core for own in owned for core in own}
    for own in owned:
        assert set(own) <= shared_cores(own, cores) <= everything


@pytest.mark.parametrize(
    ("num_own", "num_cores", "size"), [(1, 1, 1), (1, 2, 2), (1, 64, 2), (7, 16, 14), (3, 4, 4), (2, 1, 2)]
)
def test_team_is_bounded_since_it_also_runs_on_own_cores_alone(
    num_own: int, num_cores: int, size: int
) -> None:
    assert team_size(num_own, num_cores) == size
