"""The product's source files."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path for folder in ("services", "libs") for path in (ROOT / folder).glob("*/src/triptych_*/**/*.py")
)
