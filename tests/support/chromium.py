"""A Chromium for the tests of web pages: the one that is named, on the PATH, or from Debian's package."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.debian_packages import unpacked

VARIABLE = "TRIPTYCH_TEST_CHROMIUM"
PACKAGE = "chromium-headless-shell"  # a fifth of what the whole browser needs


@dataclass(frozen=True)
class Chromium:
    """What starts it. `environment`: besides the test's own."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)


def require_chromium() -> Chromium:
    """Skips the test, with the reason, where there is none."""
    named = os.environ.get(VARIABLE) or shutil.which("chromium")
    if named:
        return Chromium(Path(named))
    try:
        folder = unpacked(PACKAGE, with_needed=True)
    except FileNotFoundError as error:
        pytest.skip(f"no Chromium here: {error}; {VARIABLE} is not set")
    binary = folder / "usr" / "lib" / "chromium" / PACKAGE
    libraries = sorted({str(each.parent) for each in folder.glob("usr/lib/**/*.so*")})
    return Chromium(binary, {"LD_LIBRARY_PATH": os.pathsep.join(libraries)})
