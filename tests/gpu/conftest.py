"""Fixtures of the tests that need a GPU."""

from types import ModuleType

import pytest
from support.system import load_strips


@pytest.fixture(scope="session")
def strips() -> ModuleType:
    return load_strips()
