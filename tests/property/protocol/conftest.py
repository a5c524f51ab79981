"""For every test of the protocol's model."""

import gc
import logging
from collections.abc import Iterator

import pytest

from tests.support.protocol_world.transfers.wires import FABRIC_STAND_INS
from tests.support.protocol_world.virtual_loop import virtual_time

THRESHOLDS = (20_000, 20, 20)  # of garbage collections: worlds come and go by the thousand


@pytest.fixture(autouse=True)
def _model_time() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        with virtual_time(FABRIC_STAND_INS):
            yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.fixture(autouse=True, scope="module")
def _few_collections() -> Iterator[None]:
    """What was there before is not looked at again and again: a sixth of the time."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
