"""tests/gpu/requirements.txt holds what tests on a bare GPU machine import, with the members' bounds."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests" / "gpu" / "requirements.txt"
COMMON = ROOT / "libs" / "common" / "src"
CALLERS_BY_HTTP = COMMON / "triptych_common" / "runtime" / "http_client.py"  # the store does not import it
IMPORTED_BY_GPU_TESTS = (
    *(file for file in COMMON.rglob("*.py") if file != CALLERS_BY_HTTP),
    *(ROOT / "services" / "cache_store" / "src").rglob("*.py"),
    *(ROOT / "tests" / "gpu").glob("*.py"),
    *(ROOT / "benchmarks" / "gpu_rates").glob("*.py"),
    ROOT / "benchmarks" / "gpu_handover.py",
    ROOT / "tests" / "conftest.py",
    ROOT / "tests" / "support" / "cuda" / "gpu.py",
    ROOT / "tests" / "support" / "cuda" / "gpu_producer.py",
    ROOT / "libs" / "vllm_connector" / "src" / "triptych_vllm_connector" / "worker" / "cuda_transports.py",
)
DISTRIBUTIONS = {
    "_pytest": "pytest",
    "cuda": "cuda-bindings",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "pytest_asyncio": "pytest-asyncio",
    "yaml": "pyyaml",
}
COMES_WITH_TORCH = {"torch"}
OURS = {"triptych_common", "triptych_cache_store", "triptych_vllm_connector", "gpu_rates", "tests"}


def requirements() -> dict[str, str]:
    """Bounds, by name."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(">=") for line in lines)


def imported_at_once(file: Path) -> Iterator[str]:
    """Top-level packages that importing `file` imports; what functions import comes later, if at all."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def test_whatever_is_imported_is_required() -> None:
    needed = {
        DISTRIBUTIONS.get(name, name): str(file.relative_to(ROOT))
        for file in IMPORTED_BY_GPU_TESTS
        for name in imported_at_once(file)
        if name not in sys.stdlib_module_names | OURS | COMES_WITH_TORCH
    }
    assert len(needed) > 8, "the files were found"
    missing = {name: file for name, file in needed.items() if name not in requirements()}
    assert not missing


@pytest.mark.parametrize("name", sorted(requirements()))
def test_the_bound_is_the_members(name: str) -> None:
    """Where a member requires it as well: a lower one would be tried where it does not hold."""
    for file in ROOT.glob("*/*/pyproject.toml"):
        for bound in re.findall(rf'"{re.escape(name)}>=([\d.]+)"', file.read_text()):
            assert requirements()[name] == bound, file


def test_bindings_that_hold_the_gil_while_they_wait_are_refused_everywhere() -> None:
    """Before 12.9.1 `cudaEventSynchronize` stops every thread of the worker until the GPU is there."""
    files = [
        REQUIREMENTS,
        ROOT / "libs" / "common" / "pyproject.toml",
        ROOT / "libs" / "cli" / "src" / "triptych_cli" / "commands" / "doctor.py",
    ]
    for file in files:
        assert re.findall(r"cuda-bindings>=([\d.]+)", file.read_text()) == ["12.9.1"], file
