import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the caller's reaches a test."""
    for name in list(os.environ):
        if name.startswith(("TRIPTYCH_", "OTEL_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TRIPTYCH_RUN_DIR", str(tmp_path / "run"))
