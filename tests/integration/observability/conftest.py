"""Prometheus' own programs, where there are any."""

import pytest

from tests.support.prometheus import Binaries, require_binaries


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """Skips where there are none."""
    return require_binaries()
