"""docs/reference/endpoints.md lists exactly the endpoints of the table, with their properties."""

import re
from pathlib import Path

from triptych_gateway.endpoints.table import ENDPOINTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "endpoints.md").read_text()
ROW = re.compile(r"^\| `([A-Z]+ /[^`]*)` \| (yes|no) \| (yes|no) \| (yes|no) \| .+ \|$", re.MULTILINE)


def test_the_page_is_the_table() -> None:
    described = [(match[1], *(match[place] == "yes" for place in (2, 3, 4))) for match in ROW.finditer(PAGE)]
    wanted = [
        (f"{method} {endpoint.shown_path}", endpoint.needs_key, endpoint.takes_media, endpoint.streams)
        for endpoint in ENDPOINTS
        for method in endpoint.methods
    ]
    assert described == wanted


def test_what_is_never_taken_is_named() -> None:
    for endpoint in ENDPOINTS:
        for name in endpoint.refused_fields:
            assert f"`{name}`" in PAGE, f"{endpoint.path}: {name}"
