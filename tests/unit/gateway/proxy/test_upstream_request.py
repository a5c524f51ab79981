"""The class of a request's encodes."""

from types import SimpleNamespace
from typing import Any

import pytest

from triptych_common.protocol.messages import EncodeClass
from triptych_gateway.proxy.context import encode_class_of


@pytest.mark.parametrize(
    ("of_key", "asked", "is_later"),
    [
        (0, None, False), (0, 5, True), (0, -5, False), (0, 0, False), (5, -5, True), (5, None, True),
        (-5, 5, True), (0, True, False), (0, "5", False), (0, 1.5, False),
    ],
)  # fmt: skip
def test_a_request_may_ask_for_a_later_turn_and_for_no_earlier_one(
    of_key: int, asked: Any, is_later: bool
) -> None:
    context: Any = SimpleNamespace(priority=of_key)
    body = {} if asked is None else {"priority": asked}
    assert encode_class_of(context, body) is (EncodeClass.BATCH if is_later else EncodeClass.INTERACTIVE)
