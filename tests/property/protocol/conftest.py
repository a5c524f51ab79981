"""For every test of the protocol's model."""

import logging
from collections.abc import Iterator

import pytest

from tests.support.protocol_world.transfers.wires import FABRIC_STAND_INS
from tests.support.protocol_world.virtual_loop import virtual_time


@pytest.fixture(autouse=True)
def _model_time() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        with virtual_time(FABRIC_STAND_INS):
            yield
    finally:
        logging.disable(logging.NOTSET)
