from typing import get_args

import pytest

from triptych_common.domain import errors
from triptych_common.protocol.store import StoreFailure

CODES = get_args(StoreFailure.model_fields["code"].annotation)


@pytest.mark.parametrize("code", CODES)
def test_every_store_code_becomes_a_store_error(code: str) -> None:
    error = errors.store_error(StoreFailure.model_validate({"seq": 1, "code": code, "detail": "why"}))
    assert error.code == code
    assert str(error) == f"{code}: why"


def test_kinds_of_store_errors() -> None:
    full = errors.store_error(StoreFailure(seq=1, code="full", detail=""))
    assert isinstance(full, errors.StoreFullError)
    assert errors.StoreUnavailableError("gone").code == "unavailable"


def test_all_errors_have_one_root() -> None:
    for name in errors.__all__:
        value = getattr(errors, name)
        if isinstance(value, type):
            assert issubclass(value, errors.TriptychError)


@pytest.mark.parametrize(
    ("status_code", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_request_error_has_openai_format(status_code: int, kind: str) -> None:
    error = errors.RequestError(status_code, "bad_image", "messages[0]: not an image", "messages[0]")
    assert error.body() == {
        "error": {
            "message": "messages[0]: not an image",
            "type": kind,
            "param": "messages[0]",
            "code": "bad_image",
        }
    }
