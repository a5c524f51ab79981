"""Gather the kit for a machine with a GPU: about 45 MB.

    python -m tests.gpu.kit.build FOLDER [--vllm WHEEL]

Needs a package index. Wheels are for Python 3.12 on Linux, x86-64; versions are those of constraints.txt.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.gpu.kit.vllm_python import write_archive

ROOT = Path(__file__).resolve().parents[3]
REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CONSTRAINTS = f"--constraint={ROOT / 'constraints.txt'}"
MANYLINUX = (
    "2014",
    "1",
    "_2_5",
    "_2_12",
    "_2_17",
    "_2_24",
    "_2_26",
    "_2_27",
    "_2_28",
    "_2_31",
    "_2_34",
    "_2_35",
)
FOR_THE_MACHINE = (
    "--only-binary=:all:",
    "--python-version=3.12",
    "--implementation=cp",
    *(f"--platform=manylinux{each}_x86_64" for each in MANYLINUX),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--vllm", type=Path, metavar="WHEEL", help="vLLM's wheel for CUDA; else it is fetched"
    )
    options = parser.parse_args()
    wheels: Path = options.folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    download(wheels, f"--requirement={REQUIREMENTS}", CONSTRAINTS)
    for member in sorted(ROOT.glob("*/*/pyproject.toml")):
        pip("wheel", "--no-deps", f"--wheel-dir={wheels}", str(member.parent))
    with tempfile.TemporaryDirectory() as folder:
        wheel: Path | None = options.vllm
        if wheel is None:
            download(Path(folder), "vllm", CONSTRAINTS)
            (wheel,) = Path(folder).glob("vllm-*.whl")
        write_archive(wheel, options.folder / "vllm-python.zip")
    num_bytes = sum(file.stat().st_size for file in options.folder.rglob("*") if file.is_file())
    print(f"{options.folder}: {num_bytes / 1e6:.0f} MB")
    return 0


def download(folder: Path, *arguments: str) -> None:
    """Fetch wheels for the machine, without their requirements: the machine has some of its own."""
    pip("download", "--no-deps", *FOR_THE_MACHINE, f"--dest={folder}", *arguments)


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", arguments[0], "--quiet"]
    subprocess.run([*command, *arguments[1:]], check=True)


if __name__ == "__main__":
    raise SystemExit(main())
