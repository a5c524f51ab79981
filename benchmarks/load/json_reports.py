"""JSON reports that any reader takes: NaN and infinity, which JSON lacks, become null."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(plain(report), indent=1) + "\n")


def plain(value: Any) -> Any:
    """Plain JSON data: numpy's numbers as Python's, other objects as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
