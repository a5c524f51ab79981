"""The cores' worth of time that cgroups of both versions grant."""

import os

import pytest

from triptych_common.cores.usable import is_own_group, num_usable_cores, quota_of, usable_cores

V2 = "0::/system.slice/engine.service\n"
V1 = "9:name=systemd:/\n4:memory:/box\n3:cpu,cpuacct:/box/inner\n"


@pytest.mark.parametrize(
    ("own_cgroup", "files", "quota"),
    [
        (V2, {}, None),
        (V2, {"system.slice/engine.service/cpu.max": "max 100000\n"}, None),
        (V2, {"system.slice/engine.service/cpu.max": "150000 100000\n"}, 1.5),
        (V2, {"system.slice/cpu.max": "400000 100000\n", "cpu.max": "200000 100000\n"}, 2.0),
        (V2, {"cpu.max": "50000 100000\n"}, 0.5),
        (V2, {"cpu.max": "nonsense\n"}, None),
        (V2, {"cpu.max": "100000 0\n"}, None),
        (V1, {"cpu/box/inner/cpu.cfs_quota_us": "-1\n", "cpu/box/inner/cpu.cfs_period_us": "100000\n"}, None),
        (V1, {"cpu/box/cpu.cfs_quota_us": "150000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 1.5),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("", {"cpu.max": "100000 100000\n"}, None),
        ("rubbish\n", {}, None),
    ],
)
def test_quota(own_cgroup: str, files: dict[str, str], quota: float | None) -> None:
    assert quota_of(own_cgroup, files.get) == quota


@pytest.mark.parametrize(
    ("num_cores", "quota", "usable"), [(4, None, 4), (4, 1.5, 1), (4, 0.5, 1), (2, 8.0, 2), (64, 16.0, 16)]
)
def test_part_of_a_core_counts_for_nothing(num_cores: int, quota: float | None, usable: int) -> None:
    assert num_usable_cores(num_cores, quota) == usable


def test_affinity_counts() -> None:
    assert usable_cores() == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("autogroups", "own_cgroup", "is_own"),
    [
        ("1\n", "0::/\n", True),
        ("1\n", "4:memory:/box\n1:cpu,cpuacct:/\n0::/\n", True),
        ("1\n", "1:cpu:/box\n0::/\n", False),
        ("1\n", "0::/user.slice/user-1000.slice/session-2.scope\n", False),
        ("0\n", "0::/\n", False),
        ("", "0::/\n", False),
        ("1\n", "", False),
    ],
)
def test_a_nice_value_stays_inside_a_session_or_a_container(
    autogroups: str, own_cgroup: str, is_own: bool
) -> None:
    assert is_own_group(autogroups, own_cgroup) is is_own
