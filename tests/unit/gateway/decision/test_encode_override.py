"""Who may say whose encode a request gets."""

import pytest

from triptych_common.domain.errors import RequestError
from triptych_gateway.access.auth import Caller
from triptych_gateway.decision.decision_policy import EncodeOverride, OverrideSetting

OPERATOR, OTHER = Caller(key_name="op", is_operator=True), Caller(key_name="other")


def read(allowed: OverrideSetting, value: str | None, caller: Caller) -> str | None:
    """What it is read as, or the refusal."""
    try:
        return EncodeOverride(allowed).read(value, caller)
    except RequestError as error:
        return f"{error.status_code} {error.code}"


@pytest.mark.parametrize(
    ("allowed", "value", "caller", "expected"),
    [
        ("none", None, OTHER, None),
        ("none", "local", OPERATOR, "403 encode_override_not_allowed"),
        ("operators", "local", OPERATOR, "local"),
        ("operators", "local", OTHER, "403 encode_override_not_allowed"),
        ("all", " remote ", OTHER, "remote"),
        ("all", "auto", OTHER, "auto"),
        ("all", "LOCAL", OTHER, "400 invalid_value"),
        ("all", "", OTHER, "400 invalid_value"),
        ("all", None, OTHER, None),
    ],
)
def test_who_may_and_what(
    allowed: OverrideSetting, value: str | None, caller: Caller, expected: str | None
) -> None:
    assert read(allowed, value, caller) == expected


def test_nothing_is_learned_where_no_request_may() -> None:
    assert [EncodeOverride(each).is_possible for each in ("none", "operators", "all")] == [False, True, True]
