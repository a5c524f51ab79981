"""How long files stay, by the operator's settings."""

from typing import Any

import pytest
from pydantic import ValidationError

from triptych_gateway.settings import GatewaySettings


def test_files_do_not_live_longer_than_an_upload_may_say() -> None:
    assert GatewaySettings(files_lifetime_s=60, files_max_lifetime_s=60).files_lifetime_s == 60
    longer: list[dict[str, Any]] = [
        {"files_lifetime_s": 61, "files_max_lifetime_s": 60},
        {"files_max_lifetime_s": 60},
    ]
    for given in longer:
        with pytest.raises(ValidationError, match="files_lifetime_s"):
            GatewaySettings(**given)
