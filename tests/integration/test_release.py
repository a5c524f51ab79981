"""A release is built twice from one commit, and every service tells its version."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from triptych_common import release

ROOT = Path(__file__).resolve().parents[2]
SERVICES = (
    "triptych_gateway", "triptych_cache_store", "triptych_fabric",
    "triptych_encoder", "triptych_prefill_decode",
)  # fmt: skip


def build(out: Path, **environment: str) -> dict[str, bytes]:
    """The files of a release, by name."""
    done = subprocess.run(
        [ROOT / "deploy/release.sh", "--wheels", out],
        env={**os.environ, "TRIPTYCH_PYTHON": sys.executable, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git: a release is built from a commit")
def test_wheels_are_the_same_bit_for_bit_when_built_again(tmp_path: Path) -> None:
    first = build(tmp_path / "a")
    again = build(tmp_path / "elsewhere" / "b", TZ="Asia/Tokyo", PYTHONHASHSEED="7", TMPDIR=str(tmp_path))
    assert first == again
    members = {path.parent.name for path in ROOT.glob("*/*/pyproject.toml")}
    assert first.keys() == {f"triptych_{each}-{release()}-py3-none-any.whl" for each in members} | {
        "SHA256SUMS"
    }
    with zipfile.ZipFile(tmp_path / "a" / f"triptych_common-{release()}-py3-none-any.whl") as wheel:
        assert {"triptych_common/py.typed", "triptych_common/bus/lua/take_spare.lua"} <= set(wheel.namelist())


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_tells_the_version(service: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", service, "--version"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"triptych {release()}\n"), done.stderr
