"""Everything that our code uses of vLLM exists, and fits, in each supported version.

The installed version is checked as it is. The Python source of others comes from the package index.
"""

import functools
from pathlib import Path

import pytest

from tests.support.vllm_seams.source import SourceUnavailableError, source_of
from tests.support.vllm_seams.symbols import Tree
from tests.support.vllm_seams.uses import Uses, find_uses
from triptych_vllm_connector.versions import SUPPORTED_VLLM, vllm_version

ROOT = Path(__file__).parents[2]
LEAST_CHECKED = 900  # uses; fewer: the walk has lost the types of vLLM's objects


@functools.cache
def uses_in(release: str) -> Uses:
    try:
        folder = source_of(release)
    except SourceUnavailableError as error:
        pytest.skip(str(error))
    return find_uses(Tree(folder), ROOT, release)


@pytest.mark.parametrize("release", SUPPORTED_VLLM)
def test_each_use_of_vllm_fits_the_version(release: str) -> None:
    uses = uses_in(release)
    assert not uses.faults, "\n".join(uses.faults)
    assert uses.num_checked > LEAST_CHECKED


def test_every_supported_version_has_an_adapter() -> None:
    seams = ROOT / "libs/vllm_connector/src/triptych_vllm_connector/seams"
    adapters = {path.stem.removeprefix("vllm_") for path in seams.glob("vllm_*.py")}
    assert adapters == {"_".join(release.split(".")[:2]) for release in SUPPORTED_VLLM}


def test_parts_of_vllm_are_replaced_with_a_check_alone() -> None:
    """`seams.replacing.replace` fails where vLLM would not use the replacement; an assignment never does."""
    uses = uses_in(vllm_version())
    assert not uses.assignments, "\n".join(uses.assignments)
