"""The consumer, with everything around it played by the test."""

import pytest

from tests.support.vllm_connector.played_engine import Engine


@pytest.fixture
def engine() -> Engine:
    return Engine()
