"""A job runner and its fakes."""

import pytest

from tests.support.encoder.encoder_bench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
