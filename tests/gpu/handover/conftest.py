"""Both workers around a stub of vLLM's runner, on the machine's GPU or, with `--fake`, on one in host memory.

    python -m pytest tests/gpu/handover [--fake] [--figures FILE]

`--figures`: a JSON file for what was measured and seen, rewritten after each test.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda.gpu import why_no_gpu
from tests.support.cuda.stub.machines import FakeMachine, Machine, ProcessMachine

Figures = dict[str, Any]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fake", action="store_true", help="run on a GPU in host memory")
    parser.addoption("--figures", type=Path, metavar="FILE", help="write figures to a JSON file")


@pytest.fixture(scope="session")
def is_fake(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--fake", False))


@pytest.fixture(scope="session")
def all_figures() -> dict[str, Figures]:
    """Figures of the run, by test."""
    return {}


@pytest.fixture
def figures(request: pytest.FixtureRequest, all_figures: dict[str, Figures]) -> Iterator[Figures]:
    """Figures of this test, to be filled."""
    found: Figures = {}
    start_s = time.monotonic()
    yield found
    found["seconds"] = round(time.monotonic() - start_s, 1)
    all_figures[request.node.name] = found
    file: Path | None = request.config.getoption("--figures", None)
    if file is not None:
        file.write_text(json.dumps(all_figures, indent=1))


@pytest.fixture
def machine(is_fake: bool, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Return the parts of which systems are made in this run."""
    if is_fake:
        fake = FakeMachine(run_dir, monkeypatch)
        yield from closing(fake)
        fake.gpu.assert_no_breach()
        return
    if (reason := why_no_gpu()) is not None:
        pytest.skip(f"{reason}; --fake plays one")
    yield from closing(ProcessMachine(run_dir))


def closing(machine: Machine) -> Iterator[Machine]:
    yield machine
    machine.close()


@pytest.fixture
def gpu_machine(is_fake: bool, request: pytest.FixtureRequest) -> Machine:
    """A machine with a real GPU; with another one the test is skipped."""
    if is_fake:
        pytest.skip("needs a real GPU")
    machine: Machine = request.getfixturevalue("machine")
    return machine
