"""The consumer: a request that ends, at any point, gives everything back and sends its acks."""

import pytest

from tests.support.vllm_connector.fake_engine import fake_request, metadata
from tests.support.vllm_connector.played_engine import IDLE, A, Engine
from triptych_common.protocol.messages import ItemAck, Preallocation


@pytest.mark.parametrize("is_metadata_first", [True, False])
def test_a_request_that_ends_before_it_was_ever_admitted_declines(
    engine: Engine, is_metadata_first: bool
) -> None:
    request = fake_request("r1", [(A, 4)])
    if is_metadata_first:
        engine.receives(metadata(A, ("wire-r1", 0)))
    engine.finish(request, 0)
    if not is_metadata_first:
        engine.receives(metadata(A, ("wire-r1", 0)))
    messages = [message for _, message in engine.sender.take()]
    assert [type(message) for message in messages] == [Preallocation, ItemAck]
    assert messages[0].reason == "request_gone"  # type: ignore[attr-defined]
    assert engine.consumer.counts() == IDLE
