"""tests/gpu/requirements.txt holds what tests on a bare GPU machine import, with the members' bounds."""

import ast
import contextlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests" / "gpu" / "requirements.txt"
KIT_REQUIREMENTS = ROOT / "tests" / "gpu" / "kit" / "requirements.txt"
COMMON = ROOT / "libs" / "common" / "src"
CONNECTOR = ROOT / "libs" / "vllm_connector" / "src" / "triptych_vllm_connector"
LOADED_WORKER_MODULES = (
    "containment.py", "cuda_transports.py", "loading.py", "store_worker.py",
    "transports.py", "writing.py",
)  # fmt: skip
IMPORTED_BY_GPU_TESTS = (
    *COMMON.rglob("*.py"),
    *(ROOT / "services" / "cache_store" / "src").rglob("*.py"),
    ROOT / "tests" / "support" / "stores.py",
    *(ROOT / "tests" / "gpu").rglob("*.py"),
    *(ROOT / "benchmarks" / "gpu_rates").glob("*.py"),
    ROOT / "benchmarks" / "gpu_handover.py",
    ROOT / "tests" / "conftest.py",
    *(ROOT / "tests" / "support" / "cuda").rglob("*.py"),
    *(CONNECTOR / name for name in ("config.py", "slab_probe.py", "step_orders.py")),
    *(CONNECTOR / "worker" / name for name in LOADED_WORKER_MODULES),
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


def with_dependencies(names: Iterable[str]) -> set[str]:
    """Names of distributions and of all that they require; of one that is not installed here, its own."""
    found, left = set[str](), [canonicalize_name(name) for name in names]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            left += [
                canonicalize_name(each.name)
                for each in map(Requirement, requires(name) or ())
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def test_the_kit_brings_what_these_tests_need_beside_pytorch_transformers_and_triton() -> None:
    lines = KIT_REQUIREMENTS.read_text().splitlines()
    brought = {canonicalize_name(line) for line in lines if line and not line.startswith("#")}
    on_the_machine = with_dependencies(("torch", "transformers", "triton", "cuda-bindings"))
    needed = with_dependencies(requirements()) - on_the_machine
    assert "hypothesis" in needed
    assert not needed - brought


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


PLUGIN_OF_OPTION = {
    "asyncio_mode": "pytest-asyncio",
    "asyncio_default_fixture_loop_scope": "pytest-asyncio",
    "timeout": "pytest-timeout",
}
PYTESTS_OWN = {
    "minversion", "testpaths", "pythonpath", "addopts", "xfail_strict", "markers", "filterwarnings",
}  # fmt: skip


def test_each_option_in_pytests_configuration_has_its_plugin() -> None:
    """pytest takes no option that it does not know (`--strict-config`), so nothing would be collected."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    others = tools["pytest"]["ini_options"].keys() - PYTESTS_OWN
    assert others == PLUGIN_OF_OPTION.keys(), "name the plugin of a new option"
    members = tomllib.loads((ROOT / "libs" / "cli" / "pyproject.toml").read_text())["project"]
    for plugin in PLUGIN_OF_OPTION.values():
        assert plugin in requirements()
        assert plugin in members["optional-dependencies"]["dev"]


def test_shared_memory_lies_in_a_folder_that_can_be_set() -> None:
    """A machine's `/dev/shm` may be small, or absent: one place names it, as a default."""
    naming = [file for file in (ROOT / "tests" / "gpu").rglob("*.py") if "/dev/shm" in file.read_text()]
    assert [file.name for file in naming] == ["conftest.py"]
    assert 'os.environ.get("TRIPTYCH_TEST_SHARED_MEMORY", "/dev/shm")' in naming[0].read_text()
