"""The model folder of each family, made once for all runs on this machine."""

import hashlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.support.families.registry import ALL_FAMILIES
from tests.support.families.tokenizer import DEMO_TOKENIZER
from tests.support.model_folders import made_once
from triptych_cli.settings import CliSettings

ROOT = Path(__file__).resolve().parents[3]
MAKE_TIMEOUT_S = 300
_PACKAGE = Path(__file__).resolve().parent


def family_folder(name: str, cache: Path | None = None) -> Path:
    """The folder of family `name` below `cache`, which is in Triptych's state folder unless it is given.

    Raises:
        subprocess.CalledProcessError: it could not be made; the output says why.
    """
    if name not in ALL_FAMILIES:
        raise KeyError(name)
    cache = cache or CliSettings().state_dir / "test-models"
    return made_once(cache / f"{name}-{_digest()}", lambda folder: _make(name, folder))


def _make(name: str, folder: Path) -> None:
    """In a process of its own: it needs torch and transformers, and gives their memory back."""
    subprocess.run(
        [sys.executable, "-m", "tests.support.families.make_family", name, str(folder)],
        check=True, timeout=MAKE_TIMEOUT_S, cwd=ROOT, stdout=sys.stderr,
    )  # fmt: skip


def _digest() -> str:
    """Of everything that decides what is written."""
    files = [DEMO_TOKENIZER, _PACKAGE / "tokenizer.py", _PACKAGE / "weights.py"]
    files += sorted((_PACKAGE / "makers").glob("*.py"))
    digest = hashlib.sha256(version("transformers").encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
