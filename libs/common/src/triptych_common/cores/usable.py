"""Cores that this process may use: its affinity, narrowed by a cpuset, and its cgroup's CPU quota.

Also whether its priority counts beside other programs.
"""

import os
from collections.abc import Callable
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")


def usable_cores() -> tuple[int, ...]:
    """Return the numbers of the cores that the kernel lets this process run on, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_quota() -> float | None:
    """Return the cores' worth of CPU time of this cgroup, or None without a quota."""
    own = _read(_OWN_CGROUP)
    return None if own is None else quota_of(own, lambda path: _read(_CGROUPS / path))


def nice_stays_inside() -> bool:
    """Return whether a nice value of this process counts among its own session, or container, alone.

    With autogroups, Linux shares a core among sessions first, and `up` gives each service a session of its
    own. A container is a group in the same way. In any other cgroup a nice value counts beside all programs
    of it.
    """
    return is_own_group(_read(_AUTOGROUPS) or "", _read(_OWN_CGROUP) or "")


def is_own_group(autogroups: str, own_cgroup: str) -> bool:
    """Return whether autogroups are on and this is the root cgroup, from the texts of the kernel's files."""
    paths = {
        controllers: path
        for _, controllers, path in (line.split(":", 2) for line in own_cgroup.splitlines() if ":" in line)
    }
    found = [path for names, path in paths.items() if "cpu" in names.split(",")] or [paths.get("", "")]
    return autogroups.strip() == "1" and found == ["/"]


def num_usable_cores(num_cores: int, quota: float | None) -> int:
    """Return the number of cores that can be busy all the time, at least one: 1 for a quota of 1.5."""
    return max(1, num_cores if quota is None else min(num_cores, int(quota)))


def quota_of(own_cgroup: str, read: Callable[[str], str | None]) -> float | None:
    """Return the smallest quota from the process's cgroup up to the root, in both versions of cgroups.

    `own_cgroup`: the text of /proc/self/cgroup. `read`: a file below /sys/fs/cgroup; None: it is not there.
    A container sees its own cgroup as the root, under a path that is the host's: both places are read.
    """
    quotas: list[float | None] = []
    for line in own_cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        quota_in = _quota_v1 if controllers else _quota_v2
        quotas += [quota_in(folder, read) for folder in _upwards(path)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(path: str) -> list[str]:
    folder = PurePosixPath("/", path)
    return [str(each).strip("/") for each in (folder, *folder.parents)]


def _quota_v2(folder: str, read: Callable[[str], str | None]) -> float | None:
    fields = (read(f"{folder}/cpu.max".lstrip("/")) or "").split()
    return _ratio(*fields) if len(fields) == 2 else None


def _quota_v1(folder: str, read: Callable[[str], str | None]) -> float | None:
    for mount in ("cpu", "cpu,cpuacct"):
        base = f"{mount}/{folder}".rstrip("/")
        quota, period = read(f"{base}/cpu.cfs_quota_us"), read(f"{base}/cpu.cfs_period_us")
        if quota is not None and period is not None:
            return _ratio(quota.strip(), period.strip())
    return None


def _ratio(quota: str, period: str) -> float | None:
    """Return the quota in cores; None for `max`, -1, or what is no number."""
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
