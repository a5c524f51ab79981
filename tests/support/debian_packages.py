"""Debian's packages, unpacked for the tests below `~/.cache/triptych-tests`; nothing is installed."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

CACHE = Path.home() / ".cache" / "triptych-tests"
LIMIT_S = 120.0
DOWNLOAD = ("apt-get", "-qq", "download")
UNPACK = ("sh", "-c", 'for each in *.deb; do dpkg-deb -x "$each" unpacked; done')


def unpacked(package: str, *, with_needed: bool = False) -> Path:
    """The folder with its files. By root's apt, which checks what it downloads.

    Args:
        with_needed: with the packages that it needs and this machine lacks.

    Raises:
        FileNotFoundError: it cannot be had; says what was tried.
    """
    folder = CACHE / package
    if folder.exists():
        return folder
    if os.getuid() != 0 or not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise FileNotFoundError(f"not on the PATH, and no root's apt-get; install the package `{package}`")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        here = Path(name)
        _run(here, *DOWNLOAD, *(_with_needed(package) if with_needed else (package,)))
        _run(here, *UNPACK)
        with contextlib.suppress(OSError):  # another run was first
            (here / "unpacked").rename(folder)
    return folder


def _with_needed(package: str) -> list[str]:
    """What its installation would install, in a simulation."""
    said = _run(CACHE, "apt-get", "install", "--simulate", "--no-install-recommends", package)
    return [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]


def _run(folder: Path, *command: str) -> str:
    try:
        return subprocess.run(
            command, cwd=folder, check=True, capture_output=True, text=True, timeout=LIMIT_S
        ).stdout
    except (subprocess.SubprocessError, OSError) as error:
        raise FileNotFoundError(f"not on the PATH, and `{' '.join(command)}` failed: {error}") from None
